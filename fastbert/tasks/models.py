"""The model of a task, with fastbert inside."""

from fastbert.tasks.tables import TaskError
from fastbert.tasks.task import Task


def load_tokenizer(task: Task, folder: str):
    """The checkpoint's tokenizer, as the task needs it.

    Raises:
        TaskError: as `fast_tokenizer`.
    """
    return fast_tokenizer(folder, **task.tokenizer_options)


def fast_tokenizer(folder: str, **options):
    """The checkpoint's tokenizer.

    Raises:
        TaskError: it is not a fast one, which alone knows where tokens come from.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    if not tokenizer.is_fast:
        raise TaskError(
            f"the tokenizer of {folder} is {type(tokenizer).__name__}, which does not say where "
            "its tokens come from; save it as a fast one (tokenizer.json)"
        )
    return tokenizer


def load_model(task: Task, folder: str, *, new_head: bool, accelerated: bool):
    """transformers' model of the task, accelerated.

    Args:
        task: for the class and its labels.
        folder: a checkpoint, as transformers takes it.
        new_head: the labels are the task's; a head of other labels is replaced, and transformers
            says so. False: the checkpoint's own.
        accelerated: False leaves transformers' forward.
    """
    options = {**task.model_options(), "ignore_mismatched_sizes": True} if new_head else {}
    return load_network(
        task.auto_class, folder, accelerated=accelerated, whole=not new_head, **options
    )


def load_network(auto_class: str, folder: str, *, accelerated: bool, whole: bool = True, **options):
    """transformers' model of an Auto class, accelerated.

    A family that fastbert does not know whole gets its attention.

    Args:
        auto_class: name of the class. folder: a checkpoint, as transformers takes it.
        accelerated: False leaves transformers' forward.
        whole: the checkpoint must have all weights, since nobody is going to train new ones.
        options: of from_pretrained.

    Raises:
        TaskError: it has not.
    """
    import transformers

    from fastbert import dispatch
    from fastbert.models.accelerate import accelerate
    from fastbert.models.attention_interface import register_attention

    model, report = getattr(transformers, auto_class).from_pretrained(
        folder, output_loading_info=True, **options
    )
    if whole and report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise TaskError(
            f"{folder} has no weights for {', '.join(missing[:3])}: what a "
            f"{type(model).__name__} says with new ones would be random; take a checkpoint that "
            "was trained for this"
        )
    if not accelerated:
        return model
    try:
        return accelerate(model)
    except ValueError as error:
        dispatch.log_once(type(model).__name__, "fastbert's layers, only its attention", str(error))
        model.set_attn_implementation(register_attention())
        return model
