//! A cache on a GPU: all sequences in one request, whose lengths and pages the device reads.
//!
//! Deliberately absent: what the host would have to wait for. A length that the cache does not hold, and an entry of the page table that
//! names no page, make the rows of their sequence NaN.

use std::sync::Arc;

use rapt_core::{COMPUTED, DeviceMemory, Error, Operands, Options, Plan, Queue, Result, Shape, Spec, Tensors, View};
use rapt_cuda::NewKeys;
use rapt_quant::QuantError;

use super::append::check_new;
use super::cache::{KvCacheTensors, bottom_right, codes_of_all, of_caches};
use super::cache_view::CacheCodes;
use super::prove_apart;
use crate::Engine;

/// What the host knows of the lengths of sequences.
struct Known<'a> {
    /// Where the device reads them; `None` where all have `most` keys.
    lengths: Option<View<'a>>,
    /// Keys that a sequence has at most, new ones included.
    most: usize,
    /// New keys of each.
    added: usize,
}

impl<'a> KvCacheTensors<'a> {
    /// Keys and values to be written; `None` where there are none of them.
    fn new_keys(&self) -> Option<NewKeys<'a>> {
        self.k.filter(|k| k.shape()[1] > 0).map(|k| NewKeys { k, v: self.v })
    }

    /// What of them is written: values that lie in the keys are written with these.
    fn written_keys(&self) -> Option<NewKeys<'a>> {
        let NewKeys { k, v } = self.new_keys()?;
        Some(NewKeys { k, v: v.filter(|_| !self.values_begin_keys()) })
    }

    fn known(&self) -> Result<Known<'a>> {
        let added = self.k.as_ref().map_or(0, |k| k.shape()[1]);
        let room = self.room();
        let on_device = |lengths: &View<'_>| lengths.device() == self.q.device();
        match self.cache_seqlens {
            Some(given) if on_device(&given) => {
                if added > room {
                    let (tensor, size) = ("k", "new keys, of which the cache holds");
                    return Err(Error::SizeMismatch { tensor, size, got: added, other: "k_cache", expected: room });
                }
                Ok(Known { lengths: Some(given), most: room, added })
            }
            Some(given) => {
                let all = self.lengths()?;
                let first = all.first().copied().unwrap_or(0);
                if all.iter().any(|length| *length != first) {
                    let (expected, got) = (self.q.device(), given.device());
                    return Err(Error::DeviceMismatch { tensor: "cache_seqlens", expected, got });
                }
                Ok(Known { lengths: None, most: first + added, added })
            }
            None => {
                let most = self.lengths()?.first().copied().unwrap_or(0);
                Ok(Known { lengths: None, most, added })
            }
        }
    }

    fn spec(&self, known: &Known<'_>, options: &Options) -> Result<Spec> {
        let (mut k, mut v) = (self.k_cache.view(), self.v_cache.view());
        if self.page_table.is_none() {
            [k, v] = [k, v].map(|cache| cache.narrow(1, &(0..known.most)));
        }
        let codes = [self.k_codes.as_ref(), self.v_codes.as_ref()];
        let codes = codes_of_all(codes, &self.k_cache.view(), self.page_table.is_some(), known.most);
        let mut builder = Spec::builder(&self.q, &k, &v, options);
        builder
            .codes(codes.as_deref())
            .sinks(self.sinks.as_ref())
            .alibi_slopes(self.alibi_slopes.as_ref())
            .out(&self.out)
            .lengths(known.lengths.as_ref(), known.added);
        if let Some(lse) = &self.lse {
            builder.lse(lse);
        }
        if let Some(table) = &self.page_table {
            builder.pages(table, known.most);
        }
        builder.build().map_err(of_caches)
    }

    /// That new keys may be written.
    fn check_new_keys(&self) -> Result<()> {
        let Some(NewKeys { k, v }) = self.new_keys() else { return Ok(()) };
        let codes = [self.k_codes.as_ref(), self.v_codes.as_ref()];
        if self.out.shape().contains(&0) {
            return Err(Error::unsupported(
                "new keys without an output on a GPU",
                "nothing is launched for an empty output",
                "write the keys into the cache by an indexed assignment, and give no k and v",
            ));
        }
        check_new([Some(&k), v.as_ref()], [&self.k_cache, &self.v_cache], codes).map_err(|error| match error {
            QuantError::Core(error) => error,
            other => Error::unsupported(other.to_string(), "the cache is codes", "give no k and v"),
        })?;
        for (tensor, new, codes) in [("k", Some(&k), codes[0]), ("v", v.as_ref(), codes[1])] {
            if let Some((new, codes)) = new.zip(codes) {
                check_encoded(tensor, new, codes)?;
            }
        }
        Ok(())
    }
}

/// That new keys become codes on a device, which can tell nobody of a number without a code: it gives its factor NaN.
fn check_encoded(tensor: &'static str, new: &View<'_>, codes: &CacheCodes<'_>) -> Result<()> {
    if !COMPUTED.contains(&new.dtype()) {
        return Err(Error::UnsupportedDtype { tensor, got: new.dtype(), allowed: COMPUTED.to_vec() });
    }
    if let Some(global) = codes.global_scale.filter(|global| !(*global > 0.0 && global.is_finite())) {
        let error = QuantError::BadScale { index: Shape::from([]), got: global };
        return Err(Error::unsupported(
            error.to_string(),
            "new keys are divided by it",
            "give one that is finite and above 0",
        ));
    }
    if codes.descale.view().shape().is_empty() && !codes.format.has_nan() {
        return Err(Error::unsupported(
            format!("new keys in a cache of {} with one factor on a GPU", codes.format),
            "NaN among them has no code, and there is no factor of their own that could say so",
            "a cache with factors by token or block",
        ));
    }
    Ok(())
}

impl Engine {
    /// What runs for a cache on a GPU: as [`attention_with_kvcache`](Engine::attention_with_kvcache), for all sequences together.
    ///
    /// `cache_seqlens` and `page_table` lie on the device, which reads them when it runs; where all sequences have one length,
    /// `cache_seqlens` may lie in host memory.
    ///
    /// # Errors
    /// Any [`Error`]: everything that the host can know is proven here. [`Error::Unsupported`] for new keys in a cache of integers or 4-bit
    /// floats with one factor.
    pub fn plan_with_kvcache(&self, tensors: &KvCacheTensors<'_>, options: &Options) -> Result<Arc<Plan>> {
        tensors.check()?;
        let options = bottom_right(options, tensors.alibi_slopes.is_some(), tensors.q.shape()[1])?;
        let known = tensors.known()?;
        tensors.check_new_keys()?;
        self.plan(&tensors.spec(&known, &options)?)
    }

    /// Enqueues a plan of [`plan_with_kvcache`](Engine::plan_with_kvcache) on a stream and waits for nothing: new keys are written behind
    /// those of each sequence, then attended. Each sequence has the bits of a call alone. May be captured into a CUDA graph.
    ///
    /// A sequence whose length the cache does not hold, or whose pages the table does not name, gets NaN in every row that would read
    /// them, and no other memory is read or written for it. Two sequences that append into one page write it in no order.
    ///
    /// # Errors
    /// As [`run_async`](Engine::run_async).
    ///
    /// # Safety
    /// As [`run_async`](Engine::run_async); caches with new keys may be written too.
    pub unsafe fn attention_with_kvcache_async(
        &self,
        plan: &Plan,
        tensors: KvCacheTensors<'_>,
        workspace: DeviceMemory,
        queue: &Queue<'_>,
    ) -> Result<()> {
        let Queue::Cuda { device, stream } = *queue else {
            return Err(Error::unsupported("this queue", "its run ends with the call", "use attention_with_kvcache"));
        };
        let spec = plan.spec();
        if spec.device != rapt_core::Device::Cuda(device) {
            let (expected, got) = (spec.device, rapt_core::Device::Cuda(device));
            return Err(Error::DeviceMismatch { tensor: "queue", expected, got });
        }
        tensors.check()?;
        if spec.kv_len() > tensors.room() {
            return Err(Error::NotAsPlanned { tensor: "k_cache", what: "shape" });
        }
        tensors.check_new_keys()?;
        tensors.apart("out", &tensors.out)?;
        if let Some(lse) = &tensors.lse {
            tensors.apart("lse", lse)?;
            prove_apart("lse", lse, [("out", Some(&tensors.out.as_view()))])?;
        }
        let new = tensors.written_keys();
        let lengths = tensors.cache_seqlens.filter(|_| spec.lengths.as_deref().is_some_and(|of| of.lengths.is_some()));
        let KvCacheTensors { q, k_cache, v_cache, k_codes, v_codes, page_table, sinks, alibi_slopes, out, lse, .. } =
            tensors;
        let codes = [k_codes.as_ref(), v_codes.as_ref()];
        let codes = codes_of_all(codes, &k_cache.view(), page_table.is_some(), spec.kv_len());
        let (mut k, mut v) = (k_cache.view(), v_cache.view());
        if page_table.is_none() {
            [k, v] = [k, v].map(|cache| cache.narrow(1, &(0..spec.kv_len())));
        }
        let of_run = Tensors { codes, sinks, alibi_slopes, page_table, lengths, lse, ..Tensors::new(q, k, v, out) };
        let mut operands = Operands::check(of_run, spec)?;
        let backend = Engine::cuda(spec.device)?;
        // SAFETY: the caller vouches for memory and stream; `check_new_keys` proved that caches with new keys may be written, name every
        // address once, and share none with those.
        unsafe {
            match &new {
                Some(new) => backend.append_and_run(plan, &mut operands, new, workspace, stream),
                None => backend.run(plan, &mut operands, workspace, stream),
            }
        }
    }
}
