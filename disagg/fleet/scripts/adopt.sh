# Moves $1 to $2 unless $2 exists.
test -d "$2" || mv "$1" "$2"
