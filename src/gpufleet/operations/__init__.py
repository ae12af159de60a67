"""pyinfra operations, which converge, build, copy, reboot, and wait until endpoints answer."""
