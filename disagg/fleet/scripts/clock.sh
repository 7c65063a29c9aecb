# The seconds since 1970, with fractions. $1: a python, or nothing for perl.
if test -n "$1"; then exec "$1" -I -S -c 'import time; print(time.time())'; fi
exec perl -MTime::HiRes=time -e 'printf "%.6f\n", time' 2>/dev/null
