"""The ranks as processes of JAX, each with one device: its GPU, or the CPU.

JAX has a service of its own beside the group's store, hosted by rank 0, and ends a process by
SIGABRT when that is gone. The stop coordinator notices lost peers here as everywhere, so JAX is set
to let them come and go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from k8sjob.runtime.base.errors import EnvError
from k8sjob.runtime.base.network import is_loopback, reserve

if TYPE_CHECKING:
    from k8sjob.runtime.base.env import DistEnv
    from k8sjob.runtime.comm.process_group import Group

_JOIN_S: Final = 60
"""Seconds for a connection to rank 0, which all know by then."""


class JaxProcesses:
    """This rank's place among them.

    Attributes:
        device: what it computes on, in words.
    """

    def __init__(self, env: DistEnv, group: Group) -> None:
        """Join the others.

        Raises:
            EnvError: JAX sees other devices, or has begun to compute.
        """
        import jax

        self._jax: Any = jax
        self._first, self._alone = group.rank == 0, group.world_size == 1
        # Before the first question about devices, which starts JAX's back ends: after that no
        # process can join.
        if not self._alone:
            self._join(env, group)
        devices = jax.devices()
        # Flags for several devices on one CPU are common in tutorials of Keras.
        if len(devices) != group.world_size and not self._alone:
            raise EnvError(
                f"JAX has {len(devices)} devices for {group.world_size} ranks, and each rank drives"
                " one; remove XLA_FLAGS and JAX_NUM_CPU_DEVICES from run.env"
            )
        try:
            # _of_jax() copies pieces of variables there, from which torch takes them.
            jax.local_devices(backend="cpu")
        except RuntimeError as error:
            raise EnvError(
                "JAX has no CPU beside its GPUs, where checkpoints are put together; add cpu to"
                " JAX_PLATFORMS, or remove that from run.env"
            ) from error
        self.device = str(jax.local_devices()[0].device_kind)
        # JAX only warns where it was installed without CUDA, and computes on the CPU.
        if torch.cuda.is_available() and jax.default_backend() == "cpu":
            raise EnvError(
                f"torch sees {torch.cuda.device_count()} GPUs here and JAX sees none; install"
                " jax[cuda12] or jax[cuda13] in the image, or set resources.gpus to 0"
            )

    def _join(self, env: DistEnv, group: Group) -> None:
        # Its own handler of SIGTERM would take the place of ours, and a rank that fails would wait
        # for the others at its end.
        settings = {"jax_enable_preemption_service": False, "jax_enable_recoverability": True}
        for name, value in settings.items():
            # Older versions of JAX lack one or both.
            if hasattr(self._jax.config, name):
                self._jax.config.update(name, value)
        # A port of rank 0; the other ranks' own are not used. It is free until JAX takes it.
        with reserve("") as free:
            port = group.broadcast_bytes(f"{free.getsockname()[1]}".encode())
        # gRPC takes an IPv6 address in brackets.
        host = f"[{env.master_addr}]" if ":" in env.master_addr else env.master_addr
        address = f"{host}:{(port or b'').decode()}"
        try:
            self._jax.distributed.initialize(
                coordinator_address=address,
                num_processes=group.world_size,
                process_id=group.rank,
                local_device_ids=env.local_rank if torch.cuda.is_available() else None,
                # Else JAX would look for Slurm, GKE and others, and might find one.
                cluster_detection_method="deactivate",
                initialization_timeout=_JOIN_S,
                # Left to itself, it would listen on all addresses of the machine.
                coordinator_bind_address=address if is_loopback(env.master_addr) else None,
            )
        except RuntimeError as error:
            raise EnvError(
                f"the ranks cannot join as JAX's processes at {address}:"
                f" {str(error).splitlines()[0]}; begin `with runtime.session()` before anything"
                " that computes with JAX or Keras"
            ) from error

    def leave(self, *, first: bool) -> None:
        """Leave: before rank 0 all others do, and `first` ends the service that they needed."""
        if first == self._first and not self._alone:
            self._jax.distributed.shutdown()
