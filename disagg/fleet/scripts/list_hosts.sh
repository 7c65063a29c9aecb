# Prints the hosts that have a folder here.
cd "$HOME/.disagg/hosts" 2>/dev/null || exit 0
for one in *; do if test -d "$one"; then echo "$one"; fi; done
