"""Package transactions with the machine's own apt, dpkg, dnf and rpm, in folders of their own."""
