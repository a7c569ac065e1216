"""Where a model of Hugging Face's comes from: a folder here, the cache of the hub, or the hub itself.

Only a name that is no folder reaches the network, and only for what the cache (HF_HOME) does not hold. What can't be
had is one line, a Refused; the parent asks before any rank starts, so ranks find everything on the disk.
"""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import Refused, did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Files that hold a model's weights, or list those that do; the first that is there counts.
WHOLE = ("model.safetensors", "pytorch_model.bin")
LISTS = tuple(f"{name}.index.json" for name in WHOLE)
#: What is fetched of a model on the hub beside its weights: configuration and tokenizer, no code.
BESIDE = ["*.json", "*.model", "*.txt", "*.jinja"]


def configuration(name: str | None, overrides: dict[str, Any]) -> "PretrainedConfig":
    """Of a folder or a model on the hub, with `overrides`; or of them alone, where they name a model_type.

    Raises Refused.
    """
    from transformers import AutoConfig  # 2 s

    if "model_type" not in overrides and name is None:
        raise Refused(
            "model.name=null: nothing says what the model is. Name a folder or a model of the hub, or give its"
            " configuration: +model.config.model_type=llama and more."
        )
    try:
        if "model_type" in overrides:
            made = AutoConfig.for_model(overrides["model_type"])
        else:
            assert name is not None
            made = AutoConfig.from_pretrained(with_file(name, "config.json"), local_files_only=True)
    except (ValueError, OSError) as error:
        if isinstance(error, Refused):
            raise
        said = "model.config.model_type" if "model_type" in overrides else f"{name}/config.json"
        raise Refused(f"{said} describes no model that transformers knows: {first_line(error)}. Correct it.") from error
    told = made.to_dict()
    for key in overrides:
        if key not in told:
            raise Refused(
                f"model.config.{key} is nothing that the configuration of a {made.model_type} has."
                f" {did_you_mean(key, told, 'model.config.')}"
            )
    changed: PretrainedConfig = type(made).from_dict({**told, **overrides})
    return changed


def fetched(name: str) -> Path:
    """The folder with everything of a model: its own, or the cache's, filled from the hub where need be.

    Of what the cache holds already the hub is asked no more. Raises Refused.
    """
    folder = with_file(name, "config.json")
    if has_weights(folder):
        return folder
    if Path(name).is_dir():
        raise Refused(
            f"model.name={name} holds no weights ({' or '.join((*WHOLE, *LISTS))}, with all files that it lists)."
            " Name another folder, or use model.pretrained=false."
        )
    from huggingface_hub import snapshot_download

    for kind in ("*.safetensors", "*.bin"):
        folder = Path(asked(name, partial(snapshot_download, name, allow_patterns=[*BESIDE, kind])))
        if has_weights(folder):
            return folder
    raise Refused(f"model.name={name}: on the hub it has no weights of PyTorch's. Name another model.")


def with_file(name: str, file: str) -> Path:
    """The folder that holds `file` of a model. Raises Refused."""
    if Path(name).is_dir():
        if not (Path(name) / file).is_file():
            raise Refused(f"model.name={name} is a folder without {file}. Name a folder that save_pretrained wrote.")
        return Path(name)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise Refused(f"model.name={name} is no folder here. Correct the path.")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    held = try_to_load_from_cache(name, file)
    return Path(held if isinstance(held, str) else asked(name, lambda: hf_hub_download(name, file))).parent


def asked(name: str, download: Callable[[], str]) -> str:
    """What the hub answers. Raises Refused, one line for each way in which it does not give."""
    import httpx2  # through which huggingface_hub 2 speaks
    from huggingface_hub import errors

    for name_of_logger in ("huggingface_hub", "httpx2"):
        logging.getLogger(name_of_logger).setLevel(logging.ERROR)  # they would tell of every request
    try:
        return download()
    except errors.HFValidationError as error:
        raise Refused(f"model.name={name} is neither a folder here nor a name that the hub can have.") from error
    except errors.GatedRepoError as error:
        raise Refused(
            f"model.name={name}: the hub gives it only to those who have accepted its terms. Do so on"
            f" https://huggingface.co/{name}, and log in (hf auth login, or HF_TOKEN)."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise Refused(
            f"model.name={name} is no folder here, and the hub has no such model, or shows it to its owners only."
            " Correct the name, or log in (hf auth login, or HF_TOKEN)."
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise Refused(f"model.name={name}: {first_line(error)} Name another model.") from error
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.HfHubHTTPError,
        httpx2.HTTPError,
        OSError,
    ) as error:
        raise Refused(
            f"model.name={name} is no folder here nor in the hub's cache, and the hub can't be reached:"
            f" {first_line(error.__cause__ or error)}. Connect to it, or name a local folder."
        ) from error


def has_weights(folder: Path) -> bool:
    """Whether weights are there, all files of them."""
    if any((folder / name).is_file() for name in WHOLE):
        return True
    for name in LISTS:
        if (folder / name).is_file():
            files = json.loads((folder / name).read_text())["weight_map"].values()
            return all((folder / file).is_file() for file in files)
    return False


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"))


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
