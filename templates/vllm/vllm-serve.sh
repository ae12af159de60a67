#!/bin/sh
# Starts what its arguments say, with the API key of the unit's credentials in the environment.
# On the command line or in the unit file the key would be readable by everyone on the node.
set -eu

key_file="${CREDENTIALS_DIRECTORY:-/nonexistent}/api-key"
if [ -e "$key_file" ]; then
    # 2 is the status that the unit does not restart after.
    VLLM_API_KEY=$(cat "$key_file") || exit 2
    # vLLM takes an empty key for none and would serve everyone.
    if [ -z "$VLLM_API_KEY" ]; then
        echo "the API key is empty: put one into vllm.api_key_file and deploy again" >&2
        exit 2
    fi
    export VLLM_API_KEY
fi

exec "$@"
