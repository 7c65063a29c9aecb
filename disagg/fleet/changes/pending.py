"""A release that was deployed and does not run yet."""

from __future__ import annotations

import time


def described(release: str, runs: str, since: float | None) -> str:
    """`release 3f2a11bc pending since 2026-03-01 14:05, 9c04d7e1 runs`. since: seconds since 1970, in local time."""
    when = f" since {time.strftime('%Y-%m-%d %H:%M', time.localtime(since))}" if since else ""
    return f"release {release[:8]} pending{when}, {runs[:8] or 'an installation'} runs"
