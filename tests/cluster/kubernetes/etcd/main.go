// etcd by its own main function. `go install go.etcd.io/etcd/server/v3@VERSION` is refused, because
// its go.mod replaces its neighbours; so it is built from this module.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
