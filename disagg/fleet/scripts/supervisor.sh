# $1: the folder of a host without a service manager. $2: start, stop or restart.
for link in current running previous; do
    if test -f "$1/$link/supervise"; then exec /bin/sh "$1/$link/supervise" "$2"; fi
done
if [ "$2" = stop ]; then exit 0; fi
echo 'nothing is deployed here: disagg deploy' >&2
exit 1
