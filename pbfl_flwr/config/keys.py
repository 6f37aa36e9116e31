"""All keys of the run configuration, in groups: type, range, default and meaning, each declared here alone.

``pbfl list keys``, the site's page of keys, and the block in pyproject.toml that tells Flower which keys there are
follow from it.
A method's own keys are declared likewise, as the class ``Config`` of its module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from pbfl_flwr.config.parsing import (
    AbsolutePath,
    Augmentation,
    Concerns,
    DataPath,
    Group,
    Labels,
    NamedArguments,
    NamedValues,
    Shape,
    UserFunction,
    UserFunctions,
    class_names,
    comma_list,
)
from pbfl_flwr.util.user_code import own_code

Auto = Literal["auto"]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]

Protocol = Literal["clean", "htfl", "pfl", "fedproto"]
Predictor = Literal["head", "global", "global-local", "local", "etf"]
Moment = Literal["after", "before"]
WireDtype = Literal["float32", "float16", "bfloat16", "int8"]
Weighting = Literal["samples", "uniform"]
KlReduction = Literal["batchmean", "mean"]
Layout = Literal["channels-last", "contiguous"]
Precision = Literal["float32", "bfloat16"]
DpUnit = Literal["client", "sample"]

# Stages of the prototype pipeline; docs/methods explain them.
RegularizerForm = Literal["mse", "l2"]
Collect = Literal["post", "trajectory", "last-epoch", "before"]
CpsScheme = Literal["dimension", "block"]
Cpkd = Literal["off", "sample", "class"]
Solver = Literal["unit", "thomson", "simplex"]
Alignment = Literal["off", Solver]
Stale = Literal["keep", "drop"]

PREDICTORS: tuple[str, ...] = get_args(Predictor)
"""The predictors of the package's methods; a method of a user's may have others."""
PREDICTOR_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,39}"


def in_order(predictors: Iterable[str]) -> tuple[str, ...]:
    """Return names of predictors in the order of reports, records and tables: PREDICTORS, then others by name."""
    names = {*predictors}
    return (*(name for name in PREDICTORS if name in names), *sorted(names.difference(PREDICTORS)))


PLACE = Concerns(place=True, neutral=True, silent=True)
COURSE = Concerns(changeable=True, neutral=True)
"""Of keys that decide how a run proceeds, not what it computes."""


class RunSettings(Group):
    """The federation and its rounds."""

    method: str = Field(
        "fedproto",
        description="a name from `pbfl list methods`, or a method of your own: my_package.module:build",
    )
    method_settings: NamedValues = Field(
        "", description="settings of a method of your own, e.g. mu=0.1,warm=true"
    )
    num_clients: int = Field(20, ge=1, le=100_000, description="M, number of clients in the federation")
    min_clients: Annotated[int, COURSE] = Field(
        0,
        ge=0,
        description="number of devices needed to start a run, the others may join in any round; 0: all "
        "num-clients",
    )
    num_server_rounds: Annotated[int, Concerns(changeable=True)] = Field(
        20, ge=1, le=1_000_000, description="T, number of rounds"
    )
    patience: Annotated[int, Concerns(changeable=True)] = Field(
        0,
        ge=0,
        description="early stopping: the run ends after this many rounds without a better accuracy of the primary "
        "predictor; 0: off",
    )
    patience_on: Annotated[Literal["validation", "test"], Concerns(changeable=True)] = Field(
        "validation",
        description="the data of that accuracy: validation, which needs validation-share, or test, by which the result "
        "is then chosen",
    )
    fraction_train: float = Field(1.0, gt=0, le=1, description="share of the clients that train in a round")
    fraction_evaluate: float = Field(
        1.0, ge=0, le=1, description="share of the other clients that are evaluated in a round"
    )
    min_replies: int = Field(1, ge=1, description="the run ends if a round has fewer valid training replies")
    failure_policy: Annotated[Literal["continue", "stop"], COURSE] = Field(
        "continue",
        description="if a client fails: continue with the others, or stop the run with an error that names it",
    )
    max_upload_mb: Annotated[int, COURSE] = Field(
        256,
        ge=1,
        le=2048,
        description="largest reply of a client in MiB, as sent and in memory; larger ones are rejected without being "
        "decoded",
    )
    max_size_ratio: float = Field(
        100.0,
        ge=0,
        description="largest ratio of an upload's rows or tensors to the median of the round's uploads (ten times that "
        "for what grows with the number of samples); larger uploads are rejected; 0: off",
    )
    round_timeout: Annotated[float, COURSE] = Field(
        3600.0, gt=0, le=31_536_000, description="seconds the server waits for a round's replies"
    )
    join_timeout: Annotated[float, COURSE] = Field(
        180.0,
        gt=0,
        le=31_536_000,
        description="seconds the server waits for the clients to join, or for disconnected ones to return",
    )
    seed: Annotated[int, Concerns(neutral=True, silent=True)] = Field(
        0, ge=0, lt=2**31, description="seed of weights, batches and sampling"
    )
    protocol: Protocol = Field(
        "clean",
        description="code base whose conventions set the auto values of data loading, evaluation and averaging",
    )
    run_dir: Annotated[AbsolutePath, PLACE] = Field(
        "", description="directory of this run, an absolute path; empty: <home>/runs/<date>-<method>"
    )
    state_dir: Annotated[AbsolutePath, PLACE] = Field(
        "", description="directory in which clients store model and state; empty: <run-dir>/clients"
    )
    client_states: Annotated[Literal["auto", "always"], Concerns(neutral=True)] = Field(
        "auto",
        description="whether clients store model and state after every round: always, or auto: unless their method "
        "keeps nothing (FedAvg and its kind, with networks without BatchNorm, scored before training)",
    )
    resume: Annotated[bool, PLACE] = Field(
        False, description="continue after the last round stored in run-dir"
    )
    new_code: Annotated[bool, COURSE] = Field(
        False,
        description="continue a run, or take it for finished, although code of yours was edited since; run.json says "
        "from which round on it is used",
    )
    mods: UserFunctions = Field(
        "",
        description="Flower mods around the clients: a comma list of my_package.module:function, the outermost first",
    )
    sinks: Annotated[str, COURSE] = Field(
        "",
        description="where metrics go in addition to the JSONL: a comma list of tensorboard, wandb, mlflow and "
        "prometheus; each needs its extra",
    )

    @property
    def trained(self) -> int:
        """Number of clients to train in a round if all are available; a minimum if others may still join."""
        return max(1, round(self.fraction_train * (self.min_clients or self.num_clients)))


class DataSettings(Group):
    """The data and how it is dealt to the clients."""

    dataset: str = Field(
        "digits", description="a name from `pbfl list datasets`, or data of your own: my_package.module:load"
    )
    data_dir: Annotated[DataPath, Concerns(silent=True)] = Field(
        "",
        description="directory or file of the data, or hf://<id> of a dataset on the hub; empty: <home>/data",
    )
    download: Annotated[bool, Concerns(changeable=True, neutral=True, silent=True)] = Field(
        False, description="allow torchvision and flwr-datasets to download what is missing"
    )
    max_samples: int = Field(
        0,
        ge=0,
        description="number of samples used, drawn at random with partition-seed before partitioning; 0: all",
    )
    partition: Literal["dirichlet", "pathological", "way-shot", "natural", "iid"] | UserFunction = Field(
        "dirichlet",
        description="how samples are partitioned among clients, or a partition of your own: my_package.module:split",
    )
    dirichlet_alpha: float = Field(
        0.1, gt=0, description="concentration parameter α of the Dirichlet partition"
    )
    classes_per_client: int = Field(2, ge=1, description="pathological partition: classes per client")
    shuffled_sizes: bool = Field(
        False,
        description="pathological partition: whether a class's numbers of samples are shuffled among its clients, else "
        "the last one has the remainder",
    )
    ways: int = Field(5, ge=1, description="way-shot partition: mean number of classes per client")
    ways_deviation: int = Field(
        1, ge=0, description="way-shot partition: half-range of the number of classes per client"
    )
    shots: int = Field(
        100, ge=1, description="way-shot partition: mean number of samples per class and client"
    )
    shots_deviation: int = Field(
        1, ge=0, description="way-shot partition: half-range of the number of samples"
    )
    test_shots: int = Field(
        15, ge=1, description="way-shot partition: number of test samples per class and client"
    )
    partitioner: str = Field(
        "",
        description="dataset flwr-datasets, partition natural: Flower's class that makes the clients, e.g. "
        "DirichletPartitioner",
    )
    partitioner_settings: NamedArguments = Field(
        "",
        description="its arguments, e.g. num-partitions=20,partition-by='label',alpha=0.1 or partition-sizes=[150,50]",
    )
    min_samples: int = Field(1, ge=1, description="smallest number of samples per client")
    partition_seed: int = Field(1, ge=0, lt=2**31, description="seed of the partition (references: 1)")
    test_split: Literal["client", "official"] = Field(
        "client",
        description="client: pool all samples and split each client's share; official: use the dataset's own test set, "
        "as the way-shot partition always does if there is one",
    )
    train_share: float = Field(
        0.75,
        gt=0,
        lt=1,
        description="share of a client's samples used for training, where no test set of the dataset's own is used",
    )
    validation_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of a client's training data held out as validation data, for choosing a round",
    )
    labels: Labels = Field(
        "",
        description="all class names in the order of their ids, e.g. 'cat,dog'; empty: those found in the data",
    )
    label_column: str = Field(
        "", description="column of a table with the class; empty: 'label', else the last one but 'client'"
    )
    input_shape: Shape = Field(
        "",
        description="shape of an input, e.g. '3,64,64': images of a folder are resized to it, rows of a table reshaped",
    )

    def allowing(self, names: Collection[str]) -> DataSettings:
        """Return these settings with the functions among ``names`` as code that may be imported, all others as text."""
        code = {key: own_code(getattr(self, key), names) for key in ("dataset", "partition")}
        return self.model_copy(update=code)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names in ``labels``; empty if not set."""
        return class_names(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sides in ``input_shape``; empty if not set."""
        return tuple(int(side) for side in self.input_shape.split(",") if side)


class ModelSettings(Group):
    """Architectures."""

    models: str = Field(
        "small-4",
        description="a family, a model, a comma list, or my_package.module:function; resnet8+512-256: a "
        "classifier with hidden layers of these widths; resnet18@imagenet: pretrained with weights "
        "stored by 'pbfl weights'",
    )
    feature_dim: int = Field(
        512, ge=1, le=65_536, description="d, feature dimension, the same for all models"
    )
    initial_weights: Literal["auto", "alike", "own"] = Field(
        "auto", description="whether clients with the same architecture start from the same weights"
    )


USUAL_RATE = 0.01  # SGD's learning rate


class TrainingSettings(Group):
    """Local training."""

    local_epochs: int = Field(1, ge=1, le=1_000_000, description="E, epochs over the client's data per round")
    batch_size: int = Field(32, ge=1, le=1_000_000_000, description="B")
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="optimizer of local training; adam and adamw with β = (0.9, 0.999), ε = 1e-8"
    )
    learning_rate: float = Field(
        USUAL_RATE, gt=0, description="η, learning rate; 0.001 is usual for adam and adamw"
    )
    learning_rate_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="exponential decay of the clients' learning rate: η·decay^(t-1) in round t; 1 is off",
    )
    learning_rate_cosine: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="R, cosine annealing of the clients' learning rate over R rounds, as PyTorch's CosineAnnealingLR "
        "stepped after each round: η·½·(1 + cos(π·(t-1)/R)) in round t; round R and later ones have "
        "η·½·(1 - cos(π/R)), which is above 0 (η with R = 1); 0 is off",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd, in PyTorch's form")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="weight decay: L2 term added to the gradient; decoupled with adamw",
    )
    max_grad_norm: float = Field(
        0.0,
        ge=0,
        description="bound to which the gradient's norm is clipped, besides a method's own bound; 0 is off",
    )
    optimizer_state: Literal["fresh", "kept"] = Field(
        "fresh",
        description="momentum or Adam's moments at the start of a round: reset (fresh) or kept from the last one",
    )
    batch_order: Literal["auto", "shuffled", "fixed"] = Field(
        "auto", description="order of the training samples in each epoch"
    )
    augmentation: Augmentation = Field(
        "", description="random augmentation of training images: crop, flip or 'crop,flip'; empty: none"
    )
    drop_last: Literal["auto", "small", "always", "never"] = Field(
        "auto",
        description="drop the incomplete last batch; small: only if the client has at least one full batch; always: "
        "as many samples, the last in stored order, are also left out of class means and their counts",
    )
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], Concerns(neutral=True, silent=True)] = Field(
        "auto", description="device of the training; auto: the GPU that Flower assigns, else the CPU"
    )
    layout: Literal[Auto, Layout] = Field(
        "auto",
        description="memory layout of images: channels-last is faster, contiguous computes like the references",
    )
    precision: Precision = Field(
        "float32",
        description="precision of matrix products in a network's body; weights, features and head stay float32",
    )
    cuda_graphs: bool = Field(
        False,
        description="replay training steps as CUDA graphs; several times as fast with small networks, without effect "
        "on other devices",
    )
    threads: Annotated[
        Auto | Annotated[int, Field(ge=1, le=1024)], Concerns(changeable=True, neutral=True, silent=True)
    ] = Field(
        "auto",
        description="torch threads of a client; auto: the worker's share of the cores, on a device all cores",
    )

    @property
    def augmentations(self) -> list[str]:
        """The entries of ``augmentation``."""
        return comma_list(self.augmentation)

    def config_warnings(self) -> list[str]:
        """Return warnings about these settings, for display before a run starts."""
        warnings = []
        if self.optimizer != "sgd" and self.learning_rate >= USUAL_RATE:
            warnings.append(
                f"learning-rate = {self.learning_rate:g}: 0.001 or less is usual for {self.optimizer}"
            )
        if self.learning_rate_cosine == 1:
            warnings.append(
                "learning-rate-cosine = 1: without effect, since the rate falls only after the first round"
            )
        return warnings


class ConventionSettings(Group):
    """Where papers and code bases disagree and a result must say which it followed."""

    weighting: Literal[Auto, Weighting] = Field(
        "auto",
        description="how clients are weighted when weights are averaged: by n_i (samples), or equally (uniform)",
    )
    kl_reduction: Literal[Auto, KlReduction] = Field(
        "auto",
        description="reduction of the distillation loss: mean over B (batchmean), or over B·K as torch's default "
        "(mean)",
    )
    detach_teacher: Literal["auto", "yes", "no"] = Field(
        "auto", description="stop gradients at the other network's output in mutual distillation"
    )


class EvaluationSettings(Group):
    """Which model is scored when, and which number is the primary predictor."""

    evaluate_moment: Literal[Auto, Moment] = Field(
        "auto",
        description="when clients are scored: after local training, or before it with what was just broadcast "
        "(references)",
    )
    evaluate_every: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="N, clients are scored in every N-th round and in the last (HtFLlib's and PFLlib's eval_gap)",
    )
    per_class: bool = Field(
        False,
        description="also count results per class, for balanced accuracy and macro-F1; reveals test labels to "
        "the server",
    )
    auc: bool = Field(
        False, description="also compute the area under the ROC curve, one class against the rest"
    )
    predictor: Literal[Auto, Predictor] | Annotated[str, Field(pattern=f"^{PREDICTOR_NAME}$")] = Field(
        "auto",
        description="which prediction is the primary predictor: logits (head), nearest global prototype (global; "
        "global-local: of the client's own classes), nearest local prototype (local), GFPL's "
        "fixed frame (etf), or one that a method of your own names",
    )
    eval_batch_size: Annotated[int, Concerns(silent=True)] = Field(
        512, ge=1, le=1_000_000_000, description="batch size of the evaluation"
    )


class PrototypeSettings(Group):
    """The stages of the prototype pipeline; ``auto`` is what the method's name stands for."""

    concerns: ClassVar[Concerns] = Concerns(stage=True)

    regularizer_weight: NonNegative | Auto = Field(
        "auto", description="λ, weight of the prototype regularisation"
    )
    regularizer_form: Literal[Auto, RegularizerForm] = Field(
        "auto",
        description="form of the prototype regularisation: mean of squares over B·d (mse), or L2 norm (l2)",
    )
    collect: Literal[Auto, Collect] = Field(
        "auto",
        description="when local prototypes are computed: after training (post), as an average over training or "
        "its last epoch, or before training",
    )
    aggregation: str = Field(
        "auto",
        description="how the server combines prototypes: a name from `pbfl list rules`, or a rule of your own: "
        "my_package.module:rule",
    )
    trim_share: float = Field(
        0.2, ge=0, lt=0.5, description="trimmed-mean: share of values trimmed on each side"
    )
    cps_dim: Annotated[int, Field(ge=0)] | Auto = Field(
        "auto", description="s, number of dimensions per class that are sent; 0: all (CPS off)"
    )
    cps_scheme: CpsScheme = Field(
        "dimension",
        description="how masks are assigned: dimension by dimension, or in blocks of d/K dimensions",
    )
    cps_regularizer: Literal["full", "masked"] = Field(
        "full", description="dimensions of the prototype regularisation: all d, or only those inside the mask"
    )
    cpkd: Literal[Auto, Cpkd] = Field(
        "auto",
        description="class-proportional distillation: the prototype regularisation is weighted by class size, per "
        "sample or per class",
    )
    aps_scale: Positive | Auto = Field(
        "auto",
        description="μ, factor of adaptive prototype scaling (APS); auto: 0.9·K/n with the K classes that have a row, "
        "and no row longer than the average one times K/n",
    )
    total_examples: int = Field(
        0,
        ge=0,
        description="n in PPA: training samples of all clients, scaled by the share that answered; "
        "0: the sum of the n_i that clients report",
    )
    alignment: Literal[Auto, Alignment] = Field(
        "auto", description="solver of prototype alignment (PA); unit: only normalise prototypes to length 1"
    )
    upscale: NonNegative | Auto = Field("auto", description="γ, factor of ProtoNorm's upscaling; 1 is off")
    stale: Stale = Field(
        "keep", description="keep or drop the global prototype of a class that no client sent in a round"
    )
    wire_dtype: Annotated[WireDtype, Concerns()] = Field(  # every payload has numbers
        "float32", description="number format in which prototypes are sent"
    )


class PrivacySettings(Group):
    """What of a client's class table leaves the device, and in which form; ``docs/privacy.md`` explains each."""

    min_class_count: Annotated[Annotated[int, Field(ge=1)] | Auto, Concerns(protection=True)] = Field(
        "auto",
        description="smallest number of samples with which a class is sent; auto: 2, under the reference protocols 1",
    )
    dp_clip: Annotated[float, Concerns(protection=True)] = Field(
        0.0, ge=0, description="C, clipping norm of differential privacy (what is clipped: dp-unit); 0 is off"
    )
    dp_noise: Annotated[float, Concerns(protection=True)] = Field(
        0.0,
        ge=0,
        description="z, noise multiplier: standard deviation of the Gaussian noise divided by the sensitivity; 0 "
        "is off",
    )
    dp_delta: float = Field(1e-5, ge=1e-15, lt=1, description="δ for which ε is reported")
    dp_unit: DpUnit = Field(
        "client", description="unit of protection: all data of a client, or one sample for a given network"
    )
    dp_randomness: Literal["system", "seed"] = Field(
        "system",
        description="random source of the noise; with seed the server can predict it, so only for simulations",
    )


GROUPS: dict[str, type[Group]] = {
    "run": RunSettings,
    "data": DataSettings,
    "models": ModelSettings,
    "training": TrainingSettings,
    "evaluation": EvaluationSettings,
    "conventions": ConventionSettings,
    "prototypes": PrototypeSettings,
    "privacy": PrivacySettings,
}


def _concerning(
    flag: Literal["place", "changeable", "neutral", "silent", "stage", "protection"],
) -> tuple[str, ...]:
    """Return the keys whose declaration sets this attribute of :class:`Concerns`, in order."""
    return tuple(
        key for group in GROUPS.values() for key in group.key_names() if getattr(group.concerns_of(key), flag)
    )


PLACES = _concerning("place")
CHANGEABLE = _concerning("changeable")
NEUTRAL = _concerning("neutral")
SILENT = _concerning("silent")
STAGES = _concerning("stage")
PROTECTIONS = _concerning("protection")
