"""All keys of the run configuration, in groups: type, range, default and meaning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from pbfl_flwr.config.attack import Attack
from pbfl_flwr.config.choices import choice, one_or_each, words
from pbfl_flwr.config.faults import FaultRates
from pbfl_flwr.config.texts import class_names, named_values
from pbfl_flwr.task import MAX_AXES

Auto = Literal["auto"]


class Group(BaseModel):
    """Keys that belong together; subclasses are immutable and refuse unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
        validate_by_name=True,
        validate_by_alias=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _text(cls, given: Any) -> Any:
        """Convert numbers given for text keys: ``--set data-dir=2024`` is parsed as a number."""
        texts = {name for name, field in cls.model_fields.items() if field.annotation is str}
        texts |= {str(cls.model_fields[name].alias) for name in texts}
        return {
            key: str(value)
            if key in texts and isinstance(value, int | float) and not isinstance(value, bool)
            else value
            for key, value in dict(given).items()
        }

    @classmethod
    def key_names(cls) -> list[str]:
        """Return the kebab-case keys of this group."""
        return [name.replace("_", "-") for name in cls.model_fields]


def _absolute(path: str) -> str:
    if path and not Path(path).is_absolute():
        raise ValueError("an absolute path or nothing, since workers run in other directories")
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]

LAYOUTS = ("channels-last", "contiguous")
PRECISIONS = ("float32", "bfloat16")
PREDICTORS = ("head", "global", "global-local", "local", "etf")
AUGMENTATIONS = ("crop", "flip")


def _faults(text: str) -> str:
    FaultRates.parse(text)
    return text


def _attack(text: str) -> str:
    if text:
        Attack.parse(text)
    return text


def _augmentation(text: str) -> str:
    kinds = words(text)
    if len(set(kinds)) < len(kinds) or not set(kinds) <= set(AUGMENTATIONS):
        raise ValueError(f"nothing, or a comma list of {', '.join(AUGMENTATIONS)}, each once")
    return text


MAX_CLASSES = 10_000


def _named_values(text: str) -> str:
    named_values(text)
    return text


def _labels(text: str) -> str:
    names = class_names(text)
    if text and not (2 <= len(names) <= MAX_CLASSES and all(names) and len(set(names)) == len(names)):
        raise ValueError(f"nothing, or 2 to {MAX_CLASSES} different names, separated by commas")
    return text


def _shape(text: str) -> str:
    sides = text.split(",") if text else []
    if len(sides) > MAX_AXES or not all(re.fullmatch(r"[1-9]\d{0,5}", side) for side in sides):
        raise ValueError(f"nothing, or 1 to {MAX_AXES} whole numbers from 1, e.g. '3,64,64'")
    return text


class RunSettings(Group):
    """The federation and its rounds."""

    method: str = Field(
        "fedproto", description="one of `pbfl list methods`, or your own: my_package.page:build"
    )
    method_settings: Annotated[str, AfterValidator(_named_values)] = Field(
        "", description="settings of a method of your own, e.g. mu=0.1,warm=true"
    )
    num_clients: int = Field(20, ge=1, le=100_000, description="clients of the federation, M")
    min_clients: int = Field(
        0,
        ge=0,
        description="devices with which a run may begin; the others join in any round. 0: all num-clients",
    )
    num_server_rounds: int = Field(20, ge=1, le=1_000_000, description="rounds, T")
    patience: int = Field(
        0,
        ge=0,
        description="rounds without a better headline score (of validation data, else of test data) after which the "
        "run ends; 0: it makes them all",
    )
    keep_best: bool = Field(
        False,
        description="clients keep, beside their last state, that of the round with the best headline score",
    )
    fraction_train: float = Field(1.0, gt=0, le=1, description="share of the clients that train in a round")
    fraction_evaluate: float = Field(
        1.0, ge=0, le=1, description="share of the other clients that is evaluated"
    )
    new_clients: int = Field(
        0, ge=0, description="how many of the clients, the last ones, only take part after the last round"
    )
    new_client_rounds: int = Field(
        5, ge=1, le=1_000_000, description="rounds that those then train, their uploads unused"
    )
    min_replies: int = Field(1, ge=1, description="valid training replies below which the run ends")
    failure_policy: Literal["continue", "stop"] = Field(
        "continue", description="after a client failed: go on with the others, or end the run and name it"
    )
    stale_weight: float = Field(
        0.0, ge=0, le=1, description="w: an upload that is a rounds late counts w^a; 0 leaves it out"
    )
    faults: Annotated[str, AfterValidator(_faults)] = Field(
        "", description="faults to inject, e.g. drop=0.2,delay=5s@0.3,crash=0.05,corrupt=0.01,stale=0.1"
    )
    attack: Annotated[str, AfterValidator(_attack)] = Field(
        "",
        description="share of the clients that send false class rows, in simulations: sign-flip=0.2, scale=10@0.2, "
        "noise=0.2, permute=0.2",
    )
    max_upload_mb: int = Field(
        256, ge=1, le=2048, description="MiB of one client's answer; larger ones are refused unread"
    )
    round_timeout: float = Field(
        3600.0, gt=0, le=31_536_000, description="seconds the server waits for a round's replies"
    )
    join_timeout: float = Field(
        180.0,
        gt=0,
        le=31_536_000,
        description="seconds the server waits for the clients to join, or for lost ones to be back",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of weights, batches and sampling")
    protocol: Literal["clean", "htfl", "pfl", "fedproto"] = Field(
        "clean", description="whose conventions fill the auto values of loader, evaluation and averaging"
    )
    run_dir: AbsolutePath = Field(
        "", description="absolute directory of this run; empty: <home>/runs/<date>-<method>"
    )
    state_dir: AbsolutePath = Field(
        "", description="where clients keep model and state; empty: <run-dir>/clients"
    )
    resume: bool = Field(False, description="go on from the last round that run-dir holds")
    sinks: str = Field(
        "", description="comma list of tensorboard, wandb and mlflow, beside the JSONL; each needs its extra"
    )

    @property
    def participants(self) -> int:
        """Number of clients that take part in the rounds."""
        return self.num_clients - self.new_clients

    @property
    def trained(self) -> int:
        """Number of clients to train in a round if all are available; a minimum if others may still join."""
        return max(1, round(self.fraction_train * (self.min_clients or self.participants)))


class DataSettings(Group):
    """The data and how it is dealt to the clients."""

    dataset: str = Field("digits", description="one of `pbfl list datasets`")
    data_dir: AbsolutePath = Field("", description="where the data lies; empty: <home>/data")
    download: bool = Field(False, description="allow torchvision to download what is missing")
    max_samples: int = Field(
        0, ge=0, description="samples that are used, drawn with partition-seed before they are dealt; 0: all"
    )
    partition: Literal["dirichlet", "pathological", "way-shot", "natural", "iid"] = Field(
        "dirichlet", description="how samples are dealt to clients"
    )
    dirichlet_alpha: float = Field(0.1, gt=0, description="concentration of the Dirichlet partition")
    classes_per_client: int = Field(2, ge=1, description="classes a client holds, pathological partition")
    ways: int = Field(5, ge=1, description="mean number of classes a client holds, way-shot partition")
    ways_deviation: int = Field(1, ge=0, description="half-range of the number of classes")
    shots: int = Field(100, ge=1, description="mean number of samples of a class, way-shot partition")
    shots_deviation: int = Field(1, ge=0, description="half-range of the number of samples")
    min_samples: int = Field(1, ge=1, description="samples that every client has at least")
    partition_seed: int = Field(1, ge=0, lt=2**31, description="seed of the partition (references: 1)")
    test_split: Literal["client", "official"] = Field(
        "client", description="client: pool everything, split within the client; official: the set's own test"
    )
    train_share: float = Field(0.75, gt=0, lt=1, description="training share of a client, test-split client")
    validation_share: float = Field(
        0.0, ge=0, lt=1, description="share of a client's training data held out to choose a round by"
    )
    labels: Annotated[str, AfterValidator(_labels)] = Field(
        "", description="all class names in their order, 'cat,dog'; empty: those that the data has"
    )
    label_column: str = Field(
        "", description="column of a table that holds the classes; empty: 'label', else the last"
    )
    input_shape: Annotated[str, AfterValidator(_shape)] = Field(
        "",
        description="of an input, '3,64,64': images of a folder are brought to it, rows of a table reshaped",
    )
    text_column: str = Field(
        "", description="column of a table that holds the texts, dataset text; empty: 'text'"
    )
    vocabulary: AbsolutePath = Field(
        "", description="file with a token a line, dataset text; the same for all clients"
    )

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
        description="a family, a model, a comma list, or my_package.module:function; resnet8+512-256: hidden layers of "
        "these widths in a model's classifier; resnet18@imagenet: pretrained, with what 'pbfl weights' keeps",
    )
    feature_dim: int = Field(512, ge=1, le=65_536, description="d, the common width of features")
    initial_weights: Literal["auto", "alike", "own"] = Field(
        "auto", description="whether clients of one architecture begin with the same weights"
    )


USUAL_RATE = 0.01  # SGD's learning rate


class TrainingSettings(Group):
    """Local training."""

    local_epochs: int = Field(
        1, ge=1, le=1_000_000, description="E, passes over the client's data in a round"
    )
    batch_size: int = Field(32, ge=1, le=1_000_000_000, description="B")
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="of local training; adam and adamw with β = (0.9, 0.999), ε = 1e-8"
    )
    learning_rate: float = Field(USUAL_RATE, gt=0, description="η; adam and adamw usually take 0.001")
    learning_rate_decay: float = Field(
        1.0, gt=0, le=1, description="of every client's optimizer: its rate in round t is η·decay^(t-1)"
    )
    learning_rate_cosine: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="R, rounds in which that rate falls along half a cosine, to 0; 0 is off",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd, PyTorch's form")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="added to the gradient, times the weight; adamw takes η times that off the weight",
    )
    max_grad_norm: float = Field(0.0, ge=0, description="clip the gradient's norm; 0 is off")
    optimizer_state: Literal["fresh", "kept"] = Field(
        "fresh", description="momentum, or Adam's moments, across rounds"
    )
    batch_order: Literal["auto", "shuffled", "fixed"] = Field("auto", description="order of the batches")
    augmentation: Annotated[str, AfterValidator(_augmentation)] = Field(
        "", description="random changes of training images: crop, flip or 'crop,flip'; empty: none"
    )
    drop_last: Literal["auto", "small", "always", "never"] = Field(
        "auto",
        description="the incomplete last batch: small drops it unless the client has less than one batch",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", description="auto: the GPU Flower gives, or CPU"
    )
    layout: Annotated[str, AfterValidator(one_or_each("auto", *LAYOUTS))] = Field(
        "auto",
        description="of images in memory: channels-last is faster, contiguous is the references' arithmetic; one for "
        "all or each architecture its own: 'contiguous, cnn4=channels-last'",
    )
    precision: Annotated[str, AfterValidator(one_or_each(*PRECISIONS))] = Field(
        "float32",
        description="of the products in a network's body, float32 or bfloat16 (weights, features and head stay "
        "float32); for all, or 'float32, resnet8=bfloat16'",
    )
    compile: Literal["off", "default", "reduce-overhead", "cuda-graph"] = Field(
        "off",
        description="torch.compile of a network's body: default, or reduce-overhead, which replays it as CUDA graphs "
        "on a GPU; or cuda-graph, on a GPU the whole training step as one, without a compiler",
    )
    threads: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        "auto",
        description="torch threads of a client; auto: a worker's share of the cores, all of a device's",
    )

    @property
    def augmentations(self) -> list[str]:
        """The entries of ``augmentation``."""
        return words(self.augmentation)

    def forewarnings(self) -> list[str]:
        """Return warnings about these settings, for display before a run starts."""
        if self.optimizer == "sgd" or self.learning_rate < USUAL_RATE:
            return []
        return [f"learning-rate = {self.learning_rate:g}: {self.optimizer} usually takes 0.001 or less"]

    def of(self, architecture: str) -> TrainingSettings:
        """Return the settings of a client with this architecture: one layout and one precision."""
        return self.model_copy(
            update={
                "layout": choice(self.layout, architecture, "auto"),
                "precision": choice(self.precision, architecture, "float32"),
            }
        )


class ConventionSettings(Group):
    """Where papers and code bases disagree and a result must say which it followed."""

    weighting: Literal["auto", "samples", "uniform"] = Field(
        "auto", description="averages of weights: by n_i, or each client the same"
    )
    kl_reduction: Literal["auto", "batchmean", "mean"] = Field(
        "auto", description="of distillation: mean over B, or over B·K as torch's default"
    )
    detach_teacher: Literal["auto", "yes", "no"] = Field(
        "auto", description="whether gradients stop at the other network's output"
    )


class EvaluationSettings(Group):
    """Which model is scored when, and which number is the headline."""

    evaluate_moment: Literal["auto", "after", "before"] = Field(
        "auto", description="after local training, or before it with what was just broadcast (references)"
    )
    both_moments: bool = Field(
        False, description="score clients that train at the other moment too; evaluate-moment is the headline"
    )
    per_class: bool = Field(
        False, description="count by class too: balanced accuracy, macro-F1; tells the server the test labels"
    )
    predictor: Literal["auto", "head", "global", "global-local", "local", "etf"] = Field(
        "auto",
        description="headline: logits, nearest global / own classes' global / local prototype, GFPL's fixed frame",
    )
    eval_batch_size: int = Field(512, ge=1, le=1_000_000_000, description="samples that are scored at once")


class PrototypeSettings(Group):
    """The stages of the prototype pipeline; ``auto`` is what the method's name stands for."""

    pull_weight: Annotated[float, Field(ge=0)] | Auto = Field(
        "auto", description="λ, weight of the pull towards global prototypes"
    )
    pull_form: Literal["auto", "mse", "l2"] = Field("auto", description="mean over B·d, or the L2 norm")
    collect: Literal["auto", "post", "trajectory", "last-epoch", "before"] = Field(
        "auto",
        description="local prototypes after training, averaged on the way (or in the last epoch), or before training",
    )
    aggregation: Literal[
        "auto", "mean", "weighted", "weighted-shrunk", "ppa", "aps-sum", "aps-mean", "median", "trimmed-mean"
    ] = Field("auto", description="how the server combines prototypes")
    trim_share: float = Field(0.2, ge=0, lt=0.5, description="share trimmed on each side, trimmed-mean")
    norm_bound: float = Field(
        0.0, ge=0, description="c: the server cuts rows to c times their class's median length; 0 is off"
    )
    cps_dim: Annotated[int, Field(ge=0)] | Auto = Field(
        "auto", description="s, dimensions of a class that travel; 0: all (CPS off)"
    )
    cps_scheme: Literal["dimension", "block"] = Field(
        "dimension", description="masks by dimension or d/K blocks"
    )
    cps_pull: Literal["full", "masked"] = Field(
        "full", description="pull over all d, or inside the mask only"
    )
    cpkd: Literal["auto", "off", "sample", "class"] = Field("auto", description="class-proportional pull")
    aps_scale: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto", description="μ of adaptive prototype scaling; auto: 0.9·K/n"
    )
    ppa_total: Literal["reported", "known"] = Field(
        "reported", description="n of PPA: sum of reported n_i, or total-examples times participation"
    )
    total_examples: int = Field(
        0, ge=0, description="n when ppa-total is known, of all num-clients but new-clients"
    )
    alignment: Literal["auto", "off", "unit", "thomson", "simplex", "lbfgs"] = Field(
        "auto", description="PA solver; unit: rows get length 1 and no more"
    )
    upscale: Annotated[float, Field(ge=0)] | Auto = Field(
        "auto", description="γ of ProtoNorm's upscaling; 1 is off"
    )
    stale: Literal["keep", "drop"] = Field(
        "keep", description="a class nobody sent: keep or drop its prototype"
    )
    wire_dtype: Literal["float32", "float16", "bfloat16", "int8"] = Field(
        "float32", description="rows on the wire"
    )


class PrivacySettings(Group):
    """What of a client's class table leaves the device, and in which form; ``docs/privacy.md`` explains each."""

    min_class_count: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto", description="samples below which a class is not sent; auto: 2, reference protocols 1"
    )
    dense_uploads: bool = Field(False, description="send a row for every class, zeros for absent ones")
    count_bucket: Annotated[int, Field(ge=2)] | Literal["off", "powers"] = Field(
        "off", description="counts, also those that scale rows: exact, to powers of two, to multiples of b"
    )
    dp_clip: float = Field(0.0, ge=0, description="C, largest norm of what dp-unit clips; 0 is off")
    dp_noise: float = Field(
        0.0, ge=0, description="z, standard deviation of the Gaussian noise over the sensitivity; 0 is off"
    )
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="δ at which ε is reported")
    dp_unit: Literal["client", "sample"] = Field(
        "client", description="what the noise hides: all data of a client, or one sample for a given network"
    )
    dp_randomness: Literal["system", "seed"] = Field(
        "system", description="of the noise; seed can be predicted by the server and is for simulations only"
    )
    client_report: Literal["full", "none"] = Field(
        "full", description="none: sizes, scores, losses and timings stay on the device"
    )
    secure_aggregation: bool = Field(
        False, description="the server gets the masked sum of all uploads and no single one"
    )
    secure_range: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto", description="R, entries are clipped to ±R before they are masked; auto: 100, of sums 100000"
    )
    secure_threshold: float = Field(
        0.67, gt=0.5, le=1, description="share of the asked clients that must stay to the end of the protocol"
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
