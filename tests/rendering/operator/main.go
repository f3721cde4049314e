// Asks the training operator's own code about PyTorchJobs: for each in the JSON array on stdin, what
// its webhook says, and what environment it gives to each replica. Answers with a JSON array.
package main

import (
	"context"
	"encoding/json"
	"os"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	kubeflowv1 "github.com/kubeflow/training-operator/pkg/apis/kubeflow.org/v1"
	"github.com/kubeflow/training-operator/pkg/controller.v1/pytorch"
	webhook "github.com/kubeflow/training-operator/pkg/webhooks/pytorch"
)

type answer struct {
	Refused string                     `json:"refused"`
	Env     map[string][]corev1.EnvVar `json:"env"`
}

func ask(job *kubeflowv1.PyTorchJob) (reply answer) {
	// The webhook dereferences what it has just found missing.
	defer func() {
		if recovered := recover(); recovered != nil {
			reply.Refused = "panic"
		}
	}()
	if _, err := (&webhook.Webhook{}).ValidateCreate(context.Background(), job); err != nil {
		return answer{Refused: err.Error()}
	}
	kubeflowv1.SetDefaults_PyTorchJob(job)
	reply.Env = map[string][]corev1.EnvVar{}
	for role, spec := range job.Spec.PyTorchReplicaSpecs {
		for index := 0; index < int(*spec.Replicas); index++ {
			pod := spec.Template.DeepCopy()
			for i := range pod.Spec.Containers {
				pod.Spec.Containers[i].Env = nil
			}
			reconciler := &pytorch.PyTorchJobReconciler{}
			at := strconv.Itoa(index)
			if err := reconciler.SetClusterSpec(job, pod, strings.ToLower(string(role)), at); err != nil {
				panic(err)
			}
			reply.Env[string(role)+"-"+at] = pod.Spec.Containers[0].Env
		}
	}
	return reply
}

func main() {
	var jobs []*kubeflowv1.PyTorchJob
	if err := json.NewDecoder(os.Stdin).Decode(&jobs); err != nil {
		panic(err)
	}
	answers := []answer{}
	for _, job := range jobs {
		answers = append(answers, ask(job))
	}
	if err := json.NewEncoder(os.Stdout).Encode(answers); err != nil {
		panic(err)
	}
}
