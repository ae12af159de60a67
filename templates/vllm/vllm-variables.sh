#!/bin/sh
# Starts what its arguments say, with the variables that are credentials of the unit
# (`environment_files`): variable.NAME and variable.NAME.MODEL. In the unit file everyone on the
# node could read them.
set -eu

for gpufleet_file in "${CREDENTIALS_DIRECTORY:-/nonexistent}"/variable.*; do
    [ -e "$gpufleet_file" ] || continue
    gpufleet_name=${gpufleet_file##*/variable.}
    # 2 is the status that the unit does not restart after.
    gpufleet_value=$(/bin/cat "$gpufleet_file") || exit 2
    export "${gpufleet_name%%.*}=$gpufleet_value"
done

exec "$@"
