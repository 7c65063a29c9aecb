# $1: a host. Prints the home folder, whether disagg has a folder of that host there, and the lock's holder, if any.
folder=$HOME/.disagg/hosts/$1
printf '%s\n' "$HOME"
if test -d "$folder"; then echo yes; else echo no; fi
if test -d "$folder/lock"; then echo locked; cat "$folder/lock/holder" 2>/dev/null; fi
exit 0
