function __k8sjob
    set -l typed (commandline -ct)
    K8SJOB_COMPLETE=fish K8SJOB_LINE=(commandline -cp | string collect) k8sjob 2>/dev/null |
        while read -l -d \t kind word help
            switch $kind
                case file
                    __fish_complete_path $typed
                case dir
                    __fish_complete_directories $typed
                case '*'
                    printf '%s\t%s\n' $word $help
            end
        end
end
complete -c k8sjob -f -k -a '(__k8sjob)'
