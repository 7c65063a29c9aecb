# $1: the folder. Standard input: a tar.gz; tar and gzip fail if it is cut short. $2: a folder of parts, then four
# parameters for each file that is there: its part, SHA-256, mode and path below the folder. After path.sh and beside.sh.
# shellcheck disable=SC2088,SC2154
o=$d/.$b.old.$$
back() { if [ ! -e "$p" ] && [ -e "$o" ]; then mv "$o" "$p"; fi; } # if killed between the two mv below
trap 'back; rm -rf "$t"' EXIT
trap 'exit 1' HUP INT PIPE TERM
umask 022
rm -rf "$t" "$o"
mkdir "$t" || exit 1
(cd "$t" && exec tar -xzof -) || {  # not tar -C, which reads backslashes
  free=$(df -Pk "$t" | awk 'END { print $4 }')  # GNU tar prints "Wrote only 1536 of 10240 bytes"
  [ "${free:-64}" -ge 64 ] || echo "No space left on device" >&2
  fail "the files could not be unpacked"
}
q=$2
[ $# -lt 2 ] || shift 2
case $q in "~/"*) q=$HOME/${q#"~/"} ;; /* | "") ;; *) q=./$q ;; esac
while [ $# -gt 3 ]; do
  if command -v sha256sum >/dev/null 2>&1; then s=$(sha256sum <"$q/$1"); else s=$(shasum -a 256 <"$q/$1"); fi
  [ "${s%% *}" = "$2" ] || { rm -f "$q/$1"; fail "$4: what arrived is not what was sent"; }
  case $4 in */*) mkdir -p "$t/${4%/*}" || exit 1 ;; esac
  ln "$q/$1" "$t/$4" 2>/dev/null || cp "$q/$1" "$t/$4" || exit 1
  chmod "$3" "$t/$4" || exit 1
  shift 4
done
if [ -e "$p" ] || [ -L "$p" ]; then
  mv -f "$p" "$o" || exit 1
  mv "$t" "$p" || exit 1
  rm -rf "$o"
else
  mv "$t" "$p" || exit 1
fi
