# Everything of disagg on a machine, whichever host and fleet it belongs to. Changes nothing.
# shellcheck disable=SC2012,SC2154

hosts=$HOME/.disagg/hosts

value_of() { # a key of [fleet] in a release's hosts.toml: the text right of its "="
    cat "$1/hosts.toml" "$1/list/hosts.toml" 2>/dev/null | awk -v key="$2 = " '/^\[/ { here = $0 == "[fleet]" }
        here && index($0, key) == 1 { print substr($0, length(key) + 1); exit }'
}

sources_of() { # a release: the sources of its models, as in its hosts.toml
    cat "$1/hosts.toml" "$1/list/hosts.toml" 2>/dev/null | awk '/^\[/ { here = $0 ~ /^\[models\..*sources\]$/ }
        here && index($0, " = ") { print substr($0, index($0, " = ") + 3) }'
}

serial() { # what identifies the machine, beside its name
    cat /etc/machine-id 2>/dev/null || ioreg -rd1 -c IOPlatformExpertDevice 2>/dev/null | awk -F'"' '/IOPlatformUUID/ { print $4 }'
}

names() { # of all hosts that have a folder or a service here
    for folder in "$hosts"/*; do if test -d "$folder"; then printf '%s\n' "${folder##*/}"; fi; done
    for unit in "$HOME"/.config/systemd/user/disagg-*.service; do
        if test -f "$unit"; then unit=${unit##*/disagg-} && printf '%s\n' "${unit%.service}"; fi
    done
    for plist in /Library/LaunchDaemons/disagg.*.plist; do
        plist=${plist##*/disagg.} && plist=${plist%.plist}
        if own_daemon "$plist"; then printf '%s\n' "$plist"; fi
    done
}

own_daemon() { # host: whether its daemon is this account's. Those of all accounts are in one folder
    grep -qF "<string>${HOME%/}/.disagg/hosts/$1</string>" "/Library/LaunchDaemons/disagg.$1.plist" 2>/dev/null
}

own_limit() { # host: whether it has a wired limit, which states no account, beside a folder and without any daemon
    test -d "$hosts/$1" && test -f "/Library/LaunchDaemons/disagg.$1.wired-limit.plist" &&
        ! test -e "/Library/LaunchDaemons/disagg.$1.plist"
}

emit home "$HOME"
emit machine "$(uname -n)" "$(serial)" "$(ls -di "$HOME" 2>/dev/null | awk '{ print $1 }')"
names | sort -u | while IFS= read -r host; do
    own=$hosts/$host
    emit host "$host"
    emit_server "$host"
    if test -d "$own"; then emit folder 1; fi
    if test -d "$own/lock"; then emit locked 1; fi
    if test -f "$own/supervisor.json" || [ -n "$supervisor" ]; then emit manager process; fi
    if test -f "$HOME/.config/systemd/user/disagg-$host.service"; then emit manager systemd; fi
    if own_daemon "$host" || own_limit "$host"; then emit manager launchd; fi
    for release in "$own"/releases/*; do
        test -d "$release" || continue
        emit release "${release##*/}" "$(cat "$release/environment" 2>/dev/null)" "$(value_of "$release" name)"
        sources_of "$release" | while IFS= read -r source; do emit source "$source"; done
    done
done
for environment in "$HOME"/.disagg/envs/*; do
    if test -d "$environment"; then emit environment "${environment##*/}"; fi
done
for model in "$HOME"/.disagg/models/carried/*; do
    if test -d "$model"; then emit carried "${model##*/}"; fi
done
for repository in "$HOME"/.cache/huggingface/hub/models--*; do
    if test -d "$repository"; then emit cached "${repository##*/}"; fi
done
emit end
