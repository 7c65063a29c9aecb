# Installs this release's daemons; run by root. They start with `disagg start`, or at the next boot.
folder=$(cd "$(dirname "$0")" && pwd -P) || exit 1
for plist in "$folder"/*.plist; do
    install -o root -g wheel -m 644 "$plist" /Library/LaunchDaemons/ || exit 1
    case $plist in
        *.wired-limit.plist) # reload it: a loaded daemon keeps its old limit
            label=${plist##*/}
            /bin/launchctl bootout "system/${label%.plist}" 2>/dev/null
            /bin/launchctl bootstrap system "/Library/LaunchDaemons/$label" || true ;;
    esac
done
