"""pyinfra operations: converge, build, copy, reboot, and wait until endpoints answer."""
