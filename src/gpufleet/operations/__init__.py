"""pyinfra operations: converge, build, copy, reboot, wait until it answers."""
