# Runs checks: lines for sh that exit with 0 if something is as it should be, and may print what they found.
# $1...: pairs of a name and a line. Changes nothing.

passwordless=0
if sudo -n true >/dev/null 2>&1 </dev/null; then passwordless=1; fi
emit system "$(uname -s)" "$(id -un)" "$(id -u)" "$passwordless"
while [ $# -gt 1 ]; do
    found=$(/bin/sh -c "$2" 2>&1 </dev/null)
    emit check "$1" "$?" "$(printf '%s\n' "$found" | head -n 1)"
    shift 2
done
emit end
