#!/usr/bin/env bash
# One nightly run on your own machine: the course with --strict, compared with the previous run. With cron, at 03:17:
#
#     17 3 * * *  /path/to/this/repository/benchmarks/nightly.sh
#
# If nothing is worse it prints nothing and exits with 0. Otherwise it prints the end of its log, which cron mails, and exits with
# 1 (worse, an unexpected verdict, a failed lesson) or 2 (it could not run, or the previous run has not ended).
# Each run has a folder, build/nights/<date and time, UTC>/, with the report, results.json, junit.xml and night.log;
# build/nights/history.html has all of them. The first run has nothing to compare with, and passes if its lessons do.
# Arguments are passed on to perf-helpers course: lessons, --profile gpu, --fail-on memory,verdict.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

nights=build/nights
mkdir -p "$nights" || exit 2
exec 9>"$nights/lock"
flock --nonblock 9 || { echo "nightly: the previous run is still running" >&2; exit 2; }

before=$(find "$nights" -mindepth 2 -maxdepth 2 -name results.json | sort | tail -n 1) # an interrupted run has none
tonight=$nights/$(date -u +%Y-%m-%dT%H%M%SZ)
mkdir "$tonight" || exit 2

night() {
    make .venv/.stamp || return 2
    .venv/bin/perf-helpers course --strict --out "$tonight" ${before:+--baseline "$before"} "$@"
    local code=$?
    .venv/bin/perf-helpers history "$nights" --out "$nights/history.html"
    return $code
}

night "$@" >"$tonight/night.log" 2>&1 9>&- # its child processes do not hold the lock
code=$?
if [ $code -ne 0 ]; then
    echo "nightly: exit code $code, compared with ${before:-nothing}; the report is in $PWD/$tonight"
    tail -n 40 "$tonight/night.log"
fi
exit $code
