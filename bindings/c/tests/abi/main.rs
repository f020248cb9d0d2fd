//! The functions of rapt.h, called as C calls them.

mod backward;
mod bad_input;
mod contract;
mod contract_graph;
mod dtypes;
mod handles;
mod header;
mod kv_cache;
mod kv_cache_refused;
mod programs;
mod promises;
mod quantized;
mod ragged;
mod ragged_codes;
mod ragged_refused;
mod reference;
mod support;
mod threads;
mod tolerance;
