#!/usr/bin/env bash
# Train the service's draft on new recordings, and deploy it if it is better: nightly_draft.sh CONFIG NEW OLDER FOLDER
#
#   CONFIG      the service's configuration, which names target and draft; it names the new draft after a deployment
#   NEW, OLDER  recordings of the last day, and of before: files of JSON lines, or folders of *.jsonl
#   FOLDER      where drafts go, one folder a day; all nodes of the cluster must see it
#   DEPLOY      (environment) the command that is given Serve's configuration, "serve deploy" by default
#
# Ends with 0 if the draft was deployed, or is not better. A run that was interrupted goes on when it is repeated that day.
set -euo pipefail
config=$1 new=$2 older=$3 folder=$4
draft=$(specdec config --config "$config" | sed -n '/^draft:/,/^[^ ]/s/^  model: //p')
candidate=$folder/$(date -u +%F)
specdec render "$config" --serve >/dev/null # what cannot be deployed is refused before anything is trained

require() { # better|not-worse FILE [FLAG ...]
    local status=0
    specdec audition "${@:2}" --config "$config" --held-out --draft "$draft" --draft "$candidate" --require "$1" || status=$?
    if [ "$status" = 3 ]; then echo "$draft stays"; exit 0; fi
    return "$status"
}

if [ ! -e "$candidate/config.json" ] || [ -e "$candidate/training.pt" ]; then # else an earlier run has trained it
    specdec train-draft "$new" --config "$config" --draft "$draft" --out "$candidate" ${TRAINING:-}
fi
require better "$new"
require not-worse "$older" --same-target "$new"

sed "/^draft:/,/^[^ ]/s|$draft|$candidate|" "$config" >"$config.next"
specdec render "$config.next" --serve >"$folder/serve.yaml"
${DEPLOY:-serve deploy} "$folder/serve.yaml"
mv "$config.next" "$config"
echo "$candidate is deployed"
