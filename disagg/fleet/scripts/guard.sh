# Kills process groups whose client is gone: at the end of its input, or $1 seconds after its last input line. Then it
# ends the sshd of this connection, too, and itself.
#
# sshd does not notice a dead link, and a command without a terminal survives its connection. Input lines: `live PGID...`
# sets the groups to watch and restarts the timer; `watch PGID...` does the same and prints @watching; `end PGID` kills one
# group now. The client repeats `live` to show that it still runs, also while no group does.
live=; timer=
finish() { for p in $live; do kill -s "$1" -- "-$p"; done; }
end() { if [ -n "$live" ]; then finish TERM; sleep 1; finish KILL; fi; }
hang_up() {
  case $(ps -o comm= -p "$PPID") in *sshd*) kill "$PPID" ;; esac
  kill "$$"
}
exec 3>&1 >/dev/null 2>&1
restart() {
  [ -z "$timer" ] || kill "$timer"
  # $! is known as soon as there is a sleep, a variable a command later. KILL: its copy of this shell may hold TERM back
  (
    before=$!
    trap '[ "$!" = "$before" ] || kill -s KILL "$!"; exit' TERM
    sleep "$1" &
    wait "$!" && { end; hang_up; }
  ) 3>&- & timer=$!
}
restart "$1"
while read -r word rest; do
  case $word in
    watch) live=$rest; echo @watching >&3 ;;
    live) live=$rest ;;
    end) (live=$rest; end) 3>&- & ;;
  esac
  restart "$1"
done
kill "$timer"
end
