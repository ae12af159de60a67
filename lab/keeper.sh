#!/bin/sh
# Keep one lab node running, like the firmware of a real machine: start the node, and start it again
# after each reboot. Usage: keeper.sh COMMAND..., with these variables in the environment:
#   NODE_GROUPS   the cgroups for the node's processes
#   SYSCTL_FROM   files with the values of /proc/sys/vm after a boot
#   SYSCTL_TO     the directory of these files in the node
#   ROOT          the directory on which the node's root is mounted
#   KERNEL_LOG    the program that writes the messages of the node's kernel to its journal
#   PORT          the bridge's port to which the node is connected
set -u

REBOOT=133  # systemd-nspawn's exit status when the node has called reboot(2)

while :; do
    # Settings of the running kernel are lost at a reboot.
    cp -f "$SYSCTL_FROM"/* "$SYSCTL_TO"/

    # In its own time namespace, the node's /proc/uptime starts at 0, so programs can detect a reboot.
    uptime=$(cut -d. -f1 /proc/uptime)
    clock="unshare --time --boottime -$uptime --monotonic -$uptime --"
    $clock true 2>/dev/null || clock=

    # Create the boot's id before the boot, so that the kernel's log already has this id.
    machine=$ROOT/var/lib/gpufleet-lab/machine
    cat /proc/sys/kernel/random/uuid >"$machine/boot_id"
    echo "$uptime" >"$machine/booted_at"
    # shellcheck disable=SC2086  # $KERNEL_LOG is words
    $KERNEL_LOG "$ROOT" || echo "keeper: the node's kernel log was not written"

    echo "keeper: power on"
    # shellcheck disable=SC2086,SC2016  # $clock is words; the rest is for the inner shell
    sh -c 'for group in $NODE_GROUPS; do echo $$ >"$group/cgroup.procs" || exit 1; done; exec "$@"' \
        enter $clock "$@"
    status=$?
    echo "keeper: the node ended with status $status"
    [ "$status" = "$REBOOT" ] || break
done

# A machine that is off sends no answers, but its network namespace would refuse connections.
ip link set "$PORT" down
exit "$status"
