#!/usr/bin/env bash
# The demo fleet, a gateway in front of it, and the page. Ctrl-C stops what was started here.
set -euo pipefail
cd "$(dirname "$0")"
export DISAGG_CONFIG=${DISAGG_CONFIG:-$(cd ../.. && pwd)/disagg/demo/hosts.toml}
gateway_port=${GATEWAY_PORT:-8080} page_port=${PAGE_PORT:-8090}
page=http://127.0.0.1:$page_port
# A fleet of which anything runs before is left running.
states=$(../../.venv/bin/disagg status --json 2>/dev/null | grep '"state":' || true)
if grep -qv '"not running"' <<<"$states" && [ -n "$states" ]; then stop=true; else stop="../../.venv/bin/disagg stop"; fi
trap 'kill ${gateway:-} ${browser:-} 2>/dev/null || true; $stop' EXIT

open_page() {
  for _ in {1..240}; do
    if .venv/bin/python -c "from urllib.request import urlopen; urlopen('$page')" 2>/dev/null; then
      .venv/bin/python -m webbrowser "$page" >/dev/null 2>&1 || true
      return
    fi
    sleep 0.5
  done
}

../../.venv/bin/disagg start
../../.venv/bin/disagg serve --port "$gateway_port" &
gateway=$!
open_page &
browser=$!
echo "The page: $page"
.venv/bin/python -m grader.web --gateway "http://127.0.0.1:$gateway_port/v1" --port "$page_port" --store "${STORE:-grades.db}"
