"""Paged MLA KV caches for DeepSeek-, GLM-5- and Kimi-style attention in JAX, with FP8 rows written by fused Pallas kernels."""

from importlib.metadata import version as _version

from mla_jax.attention import mla_decode as mla_decode
from mla_jax.attention import mla_prefill as mla_prefill
from mla_jax.cache import PagedMLACache as PagedMLACache
from mla_jax.cache import convert as convert
from mla_jax.cache import init_cache as init_cache
from mla_jax.config import CacheConfig as CacheConfig
from mla_jax.config import pages_that_fit as pages_that_fit
from mla_jax.explain import explain as explain
from mla_jax.geometry import GEOMETRIES as GEOMETRIES
from mla_jax.geometry import IndexerGeometry as IndexerGeometry
from mla_jax.geometry import MLAGeometry as MLAGeometry
from mla_jax.in_place import assert_in_place as assert_in_place
from mla_jax.indexer import indexer_logits as indexer_logits
from mla_jax.layout import CacheLayout as CacheLayout
from mla_jax.layout import IndexLayout as IndexLayout
from mla_jax.layout import WritePath as WritePath
from mla_jax.merge import merge_lse as merge_lse
from mla_jax.pages import Allocation as Allocation
from mla_jax.pages import OutOfPagesError as OutOfPagesError
from mla_jax.pages import PageAllocator as PageAllocator
from mla_jax.positions import expand_rows as expand_rows
from mla_jax.positions import positions_to_slots as positions_to_slots
from mla_jax.reads import raw_rows as raw_rows
from mla_jax.reads import read_index_k as read_index_k
from mla_jax.reads import read_kv as read_kv
from mla_jax.sparse import sparse_mla as sparse_mla
from mla_jax.straight_through import straight_through as straight_through
from mla_jax.straight_through import straight_through_index as straight_through_index
from mla_jax.topk import select_topk as select_topk
from mla_jax.training import attention as attention
from mla_jax.training import attention_distribution as attention_distribution
from mla_jax.training import indexer_kl as indexer_kl
from mla_jax.training import indexer_scores as indexer_scores
from mla_jax.training import sparse_attention as sparse_attention
from mla_jax.writes import write_index_k as write_index_k
from mla_jax.writes import write_kv as write_kv

__all__ = [
    "GEOMETRIES",
    "Allocation",
    "CacheConfig",
    "CacheLayout",
    "IndexLayout",
    "IndexerGeometry",
    "MLAGeometry",
    "OutOfPagesError",
    "PageAllocator",
    "PagedMLACache",
    "WritePath",
    "assert_in_place",
    "attention",
    "attention_distribution",
    "convert",
    "expand_rows",
    "explain",
    "indexer_kl",
    "indexer_logits",
    "indexer_scores",
    "init_cache",
    "merge_lse",
    "mla_decode",
    "mla_prefill",
    "pages_that_fit",
    "positions_to_slots",
    "raw_rows",
    "read_index_k",
    "read_kv",
    "select_topk",
    "sparse_attention",
    "sparse_mla",
    "straight_through",
    "straight_through_index",
    "write_index_k",
    "write_kv",
]

__version__ = _version("mla-jax")
