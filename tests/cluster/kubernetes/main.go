// Kubernetes in one binary, by the name it is called by: control plane, node agent and kubectl.
//
// k8s.io/kubernetes cannot be built by `go install NAME@VERSION`, because its staging modules are
// replaced in its go.mod; so this module requires it and replaces them by their published versions.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // the clients' own metrics
	"k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
	_ "sigs.k8s.io/scheduler-plugins/apis/config/scheme" // the plugin's arguments
	"sigs.k8s.io/scheduler-plugins/pkg/coscheduling"
)

// A new command for each name. A kubelet's context is plain: its command sets up the signals itself.
var commands = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-scheduler":          newScheduler,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kubectl":                 cmd.NewDefaultKubectlCommand,
}

// The plugin does nothing unless a configuration names it: see COSCHEDULING in bed/components.py.
func newScheduler() *cobra.Command {
	return scheduler.NewSchedulerCommand(scheduler.WithPlugin(coscheduling.Name, coscheduling.New))
}

func main() {
	name := filepath.Base(os.Args[0])
	command, known := commands[name]
	if !known {
		fmt.Fprintf(os.Stderr, "called as %q; link one of %v to this binary\n", name, names())
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}

func names() (all []string) {
	for name := range commands {
		all = append(all, name)
	}
	return all
}
