_k8sjob() {
    local kind word help line=${COMP_LINE:0:COMP_POINT}
    local typed=${line##*[[:space:]]} here=${COMP_WORDS[COMP_CWORD]}
    [[ $here == [=:] ]] && here=
    local before=${typed%"$here"}  # bash takes what follows = or : for a word of its own
    COMPREPLY=()
    while IFS=$'\t' read -r kind word help; do
        case $kind in
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
            part) compopt -o nospace; COMPREPLY+=("${word#"$before"}") ;;
            word) COMPREPLY+=("${word#"$before"}") ;;
        esac
    done < <(K8SJOB_COMPLETE=bash K8SJOB_LINE=$line "$1" 2>/dev/null)
}
complete -o nosort -F _k8sjob k8sjob
