"""Loading, saving and measuring fastbert's models, which transformers does but for this."""

from fastbert.cache import CachesWeights
from fastbert.folders import check_folder


class LoadsFolders(CachesWeights):
    """Base of models and heads: `from_pretrained` says of a folder that it does not exist, and a
    frozen model is not saved in part."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """transformers' `from_pretrained`.

        Raises:
            FileNotFoundError: a path that leads nowhere.
        """
        check_folder("pretrained_model_name_or_path", pretrained_model_name_or_path)
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """transformers' `save_pretrained`.

        Raises:
            NotImplementedError: the model, or one inside it, is frozen; nothing is written.
        """
        # transformers writes the configuration before it asks for the weights.
        self.refuse_if_frozen_within("save_pretrained()")
        return super().save_pretrained(save_directory, *args, **kwargs)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """transformers' `get_memory_footprint`, in bytes; of a frozen model with the packed weights
        in the place of those that were dropped."""
        caches = [m.weight_cache.frozen for m in self.modules() if isinstance(m, CachesWeights)]
        return super().get_memory_footprint(return_buffers) + sum(
            sum(t.nbytes for t in frozen.packed) - sum(t.nbytes for t in frozen.dropped)
            for frozen in caches
            if frozen is not None
        )
