"""`TopologySettings`: where the jobs of an environment run, and what it starts for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tidegate.api.config.sections import setting_values as of
from tidegate.api.config.sections.section import Section
from tidegate.api.config.sections.setting_names import KEYS


class TopologySettings(Section):
    """Each is an argument of the calls that make an environment, too, which counts more.

    What only some of the targets have waits for one of these: a file may serve a laptop and a cluster.
    """

    target: Annotated[Literal["local", "ray", "raydp", "on_spark"], BeforeValidator(of.target)] = Field(
        default="local", alias=KEYS["target"][0]
    )
    """Which environment `StreamEnvironment.from_config` makes: that of `local`, `ray`, `raydp` or `on_spark`."""

    parallelism: Annotated[int | None, BeforeValidator(of.parallelism)] = Field(
        default=None, alias=KEYS["parallelism"][0]
    )
    """Parallelism of steps that name none. None: 1, and with Spark the number of executors."""

    max_parallelism: Annotated[int | None, BeforeValidator(of.max_parallelism)] = Field(
        default=None, alias=KEYS["max_parallelism"][0]
    )
    """Number of key groups: the most subtasks that a step may ever have. None: as in the checkpoint; else by size."""

    address: Annotated[str | None, BeforeValidator(of.name)] = Field(default=None, alias=KEYS["address"][0])
    """`host:port` of a Ray cluster that runs. None: with `raydp` one is started here; with `ray`, `RAY_ADDRESS`, or the
    one cluster of this user on this machine."""

    slots: Annotated[int | None, BeforeValidator(of.optional_positive)] = Field(default=None, alias=KEYS["slots"][0])
    """With `ray`: task slots to reserve, a CPU each. None: none are."""

    placement: Annotated[Literal["spread", "pack", "strict_pack"], BeforeValidator(of.placement)] = Field(
        default="spread", alias=KEYS["placement"][0]
    )
    """On which nodes slots lie: on many, on few, or all on one."""

    include_dashboard: Annotated[bool, BeforeValidator(of.switch)] = Field(
        default=True, alias=KEYS["include_dashboard"][0]
    )
    """Whether a Ray that is started has its dashboard."""

    object_store_memory: Annotated[int | None, BeforeValidator(of.optional_size)] = Field(
        default=None, alias=KEYS["object_store_memory"][0]
    )
    """With `on_spark`: bytes of each node's object store. None: what Ray thinks fit."""

    ray_options: Annotated[dict[str, Any], BeforeValidator(of.ray_options)] = Field(
        default_factory=dict, alias=KEYS["ray_options"][0]
    )
    """Arguments of `ray.init`, with `raydp` and `on_spark`; with `ray` only its `runtime_env`."""

    cluster_options: Annotated[dict[str, Any], BeforeValidator(of.options)] = Field(
        default_factory=dict, alias=KEYS["cluster_options"][0]
    )
    """Arguments of `ray.util.spark.setup_ray_cluster`, with `on_spark`."""

    executors: Annotated[int | None, BeforeValidator(of.optional_positive)] = Field(
        default=None, alias=KEYS["executors"][0]
    )
    """Executors of Spark: `raydp` starts so many, 2 if it is not said; `on_spark` uses so many, or all."""

    executor_cores: Annotated[int, BeforeValidator(of.positive)] = Field(default=1, alias=KEYS["executor_cores"][0])
    """Cores of each executor that is started."""

    executor_memory: Annotated[int, BeforeValidator(of.positive_size)] = Field(
        default=1024**3, alias=KEYS["executor_memory"][0]
    )
    """Bytes of the heap of each executor that is started."""

    slots_per_executor: Annotated[int | None, BeforeValidator(of.optional_positive)] = Field(
        default=None, alias=KEYS["slots_per_executor"][0]
    )
    """Task slots beside each executor. None: 2 with `raydp`; with `on_spark` all of its cores but one."""

    app_name: Annotated[str, BeforeValidator(of.name)] = Field(default="tidegate", alias=KEYS["app_name"][0])
    """Name of the Spark application."""

    spark_configs: Annotated[dict[str, str], BeforeValidator(of.spark_configs)] = Field(
        default_factory=dict, alias=KEYS["spark_configs"][0]
    )
    """Settings of Spark itself: every other key that begins with `spark.`, as in `spark-defaults.conf`."""

    @property
    def runtime_env(self) -> Mapping[str, Any]:
        """The `runtime_env` of `ray_options`; empty if there is none."""
        found: Mapping[str, Any] | None = self.ray_options.get("runtime_env")
        return {} if found is None else found

    def of_spark(self) -> dict[str, str]:
        """What a SparkSession is made of: the settings of Spark, and those of its executors that were given."""
        executors = {
            "spark.executor.instances": None if self.executors is None else str(self.executors),
            "spark.executor.cores": str(self.executor_cores) if "executor_cores" in self.model_fields_set else None,
            "spark.executor.memory": f"{self.executor_memory}b" if "executor_memory" in self.model_fields_set else None,
        }
        return {**self.spark_configs, **{key: value for key, value in executors.items() if value is not None}}
