#!/bin/sh
# Keep one lab node running, as a real machine's firmware would: start it, and start it again when it
# asks for a reboot. Usage: keeper.sh COMMAND..., with in the environment
#   NODE_GROUPS   the cgroups that the node's processes belong in
#   SYSCTL_FROM   files as a freshly booted kernel has them in /proc/sys/vm
#   SYSCTL_TO     where the node sees them
#   ROOT          the node's root, mounted here
#   KERNEL_LOG    the program that gives the node's journal what its kernel has said
#   PORT          the bridge's port that the node is plugged into
set -u

REBOOT=133  # systemd-nspawn's exit status when the node has called reboot(2)

while :; do
    # Settings of the running kernel are lost at a reboot.
    cp -f "$SYSCTL_FROM"/* "$SYSCTL_TO"/

    # A time namespace of its own: /proc/uptime starts at 0, so a reboot can be seen from it.
    uptime=$(cut -d. -f1 /proc/uptime)
    clock="unshare --time --boottime -$uptime --monotonic -$uptime --"
    $clock true 2>/dev/null || clock=

    # The boot is known by its id before it begins, so that the kernel's log can be there.
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

# A machine that is off answers nothing; its network namespace would, with refusals.
ip link set "$PORT" down
exit "$status"
