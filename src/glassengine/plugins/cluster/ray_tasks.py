"""Workers that are tasks of a Ray cluster: one that exists, or one that is started on this machine for the time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

from glassengine.errors import BackendError, first_line
from glassengine.extensions import require_package
from glassengine.workers.protocol import AHEAD, ATTEMPTS, Died, Failed, result_or_error, windowed

AUTO = "auto"


def require_ray() -> Any:
    """Return Ray.

    Raises:
        UsageError: It is not installed.
    """
    return require_package("ray", "--cluster needs Ray", "pip install 'glassengine[ray]', or --jobs N")


class RayTasks:
    """Tasks of a cluster; Ray itself starts one again elsewhere when its worker dies.

    Args:
        function: Of a module that the workers can import; runs there.
        address: `ray://HOST:PORT`, `HOST:PORT`, or "auto": the cluster that this machine belongs to, or one of its own.
        count: Tasks at the same time; None is one for each processor of the cluster.

    Raises:
        UsageError: Ray is not installed, or the address is none.
        BackendError: The cluster cannot be reached.
    """

    def __init__(self, function: Callable[[Any], Any], address: str, count: int | None = None) -> None:
        self._ray = ray = require_ray()
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            self._start(address, count)
        resources: dict[str, float] = ray.cluster_resources()
        available = int(resources.get("CPU", 0))
        if available < 1:
            raise BackendError("the cluster has no processor", got=address)
        self.count = available if count is None else count
        # A task may wait for its data: what bounds them is the window, and one processor each.
        self._function = function

    def run(self, requests: Iterable[Any], *, attempts: int = ATTEMPTS) -> Generator[Any, None, None]:
        """Yield the result of each request; see `protocol.Workers`."""
        ray = self._ray
        options = {"num_cpus": 1, "max_retries": attempts - 1, "scheduling_strategy": "SPREAD"}
        task = ray.remote(**options)(result_or_error)
        under_way: set[Any] = set()

        def start(request: Any) -> Any:
            reference = task.remote(self._function, request)
            under_way.add(reference)
            return reference

        try:
            for reference in windowed(start, requests, AHEAD * self.count):
                try:
                    found = ray.get(reference)
                except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
                    found = Died(first_line(error))
                except ray.exceptions.RayTaskError as error:
                    raise BackendError("a worker of the cluster has failed", got=first_line(error.cause)) from error
                under_way.discard(reference)
                if isinstance(found, Failed):
                    raise found.error
                yield found
        finally:
            for reference in under_way:
                ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._is_ours:
            self._ray.shutdown()

    def _start(self, address: str, count: int | None) -> None:
        ray = self._ray
        # What Ray knows to be no script gets no working directory among the places of its modules: see `starting`.
        job = ray.job_config.JobConfig(_client_job=True)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "job_config": job}
        try:
            if address != AUTO:
                ray.init(address, **options)
                return
            try:
                ray.init("auto", **options)
            except ConnectionError:  # this machine belongs to none
                ray.init(num_cpus=count, include_dashboard=False, **options)
        except (ConnectionError, RuntimeError, OSError, ValueError) as error:
            raise BackendError(
                "the Ray cluster cannot be used",
                got=f"{address}: {first_line(error)}",
                expected="ray://HOST:PORT, HOST:PORT or auto",
                hint="--jobs N judges in processes of this machine",
            ) from error
