# What all scripts share that take a path as $1: it becomes $p. Before each of them.
# shellcheck disable=SC2088
LC_ALL=C; export LC_ALL
p=$1
case $p in "~/"*) p=$HOME/${p#"~/"} ;; esac
case $p in /*) ;; *) p=./$p ;; esac
fail() { echo "$*" >&2; exit 1; }
