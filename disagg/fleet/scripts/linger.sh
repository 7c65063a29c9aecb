# $1: the user whose services are to run without a login.
loginctl enable-linger "$1" || exec sudo -n loginctl enable-linger "$1"
