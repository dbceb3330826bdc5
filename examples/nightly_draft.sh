#!/usr/bin/env bash
# Train the service's draft on new recordings, and deploy it if it is better: nightly_draft.sh CONFIG NEW OLDER FOLDER
#
#   CONFIG      the service's configuration, which names target and draft; it names the new draft after a deployment
#   NEW, OLDER  recordings of the last day, and of before: files of JSON lines, or folders of *.jsonl
#   FOLDER      where drafts go, one folder a day; all nodes of the cluster must see it
#   DEPLOY      (environment) the command that is given Serve's configuration, "serve deploy" by default
#
# Ends with 0 if the draft was deployed, or is not better, or if nothing was recorded. A run that was interrupted goes on
# when it is repeated that day with the same recordings. Of a draft that was refused its folder stays, with a file "refused".
set -euo pipefail
config=$1 new=$2 older=$3 folder=$(realpath "$4")
model_of() { specdec config --config "$1" | sed -n '/^draft:/,/^[^ ]/s/^  model: //p'; }
draft=$(model_of "$config")
candidate=$folder/$(date -u +%F)

# What cannot be deployed is refused before anything is trained.
sed "/^draft:/,/^[[:alpha:]]/s|$draft|$candidate|" "$config" >"$config.next"
if [ "$(model_of "$config.next")" != "$candidate" ]; then
    echo "$config must name its draft in the section draft, as $draft: there a new one's name is put" >&2
    exit 1
fi
specdec render "$config" --serve >/dev/null

stays() { rm "$config.next"; echo "$1: $draft stays"; exit 0; }

require() { # better|not-worse FILE [FLAG ...]
    local status=0
    specdec audition "${@:2}" --config "$config" --held-out --draft "$draft" --draft "$candidate" --require "$1" || status=$?
    if [ "$status" = 3 ]; then
        touch "$candidate/refused"
        find "$candidate" -mindepth 1 ! -name refused -delete
        stays "$candidate was refused"
    fi
    return "$status"
}

if [ "$draft" -ef "$candidate" ]; then stays "$candidate was deployed before"; fi
if [ -e "$candidate/refused" ]; then stays "$candidate was refused before; to try again today, remove it"; fi
recorded=$(find -L "$new" -type f -size +0 -print -quit)
if [ -z "$recorded" ]; then stays "$new has no recordings"; fi
if [ ! -e "$candidate/config.json" ] || [ -e "$candidate/training.pt" ]; then # else an earlier run has trained it
    specdec train-draft "$new" --config "$config" --draft "$draft" --out "$candidate" ${TRAINING:-}
fi
require better "$new"
require not-worse "$older" --same-target "$new"

specdec render "$config.next" --serve >"$folder/serve.yaml"
${DEPLOY:-serve deploy} "$folder/serve.yaml"
mv "$config.next" "$config"
echo "$candidate is deployed"
