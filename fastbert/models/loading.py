"""Loading of a checkpoint into fastbert's classes, which transformers does but for the folder."""

from fastbert.cache import CachesWeights
from fastbert.folders import check_folder


class LoadsFolders(CachesWeights):
    """Base of models and heads: `from_pretrained` says of a folder that it does not exist."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """transformers' `from_pretrained`.

        Raises:
            FileNotFoundError: a path that leads nowhere.
        """
        check_folder("pretrained_model_name_or_path", pretrained_model_name_or_path)
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
