# Runs a Python program that is in $DISAGG_PROGRAM, so that no process list shows it. $1: a python. $2...: its arguments.
python=$1
shift
exec "$python" -I -c 'import os; exec(os.environ.pop("DISAGG_PROGRAM"))' "$@"
