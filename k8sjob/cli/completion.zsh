#compdef k8sjob
_k8sjob() {
    local kind word help line typed="${(j: :)words[1,CURRENT]}"
    local -a whole parts
    for line in "${(@f)$(K8SJOB_COMPLETE=zsh K8SJOB_LINE=$typed $words[1] 2>/dev/null)}"; do
        IFS=$'\t' read -r kind word help <<< "$line"
        case $kind in
            file) _files ;;
            dir) _files -/ ;;
            part) parts+=("${word//:/\\:}${help:+:$help}") ;;
            word) whole+=("${word//:/\\:}${help:+:$help}") ;;
        esac
    done
    (( $#parts )) && _describe -V field parts -S ''
    (( $#whole )) && _describe -V word whole
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _k8sjob "$@"; else compdef _k8sjob k8sjob; fi
