//! Calls that were served before: their plan and their proof are kept, so that the next one runs at once.
//!
//! A proof is a function of what the caller's structs say, addresses included, and of nothing else: equal [`Key`]s have equal
//! proofs. A call whose structs say the same, word by word, as an earlier one that was served is therefore not proven again.
//! It is what a loop over the same buffers does; any other call is proven, and kept in the engine's [`CallCache`].
//! Deliberately absent: anything of the tensors' contents, and refusals, which are found anew each time.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use engine::{CallCache, Engine, Operands, Plan};

use crate::abi::{rapt_options, rapt_tensor};
use crate::read::Call;
use crate::refusal::Refusal;

/// Calls that are kept.
const PLACES: usize = 64;
/// More dimensions are not served, so they are not kept either.
const MOST_DIMS: usize = 4;
/// q, k, v, out, mask, sinks, alibi_slopes, lse.
const MOST_TENSORS: usize = 8;
const TENSOR_WORDS: usize = 5 + 2 * MOST_DIMS;
const OPTION_WORDS: usize = 7;

/// What a call's structs say, word by word.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    words: [u64; OPTION_WORDS + MOST_TENSORS * TENSOR_WORDS],
}

fn pair(low: i32, high: i32) -> u64 {
    u64::from(low.cast_unsigned()) | u64::from(high.cast_unsigned()) << 32
}

/// `pointer`, if something can be read through it.
fn readable<T>(pointer: *const T) -> Option<*const T> {
    (!pointer.is_null() && pointer.is_aligned()).then_some(pointer)
}

/// Copies what lies at `from`.
///
/// # Safety
/// A `from` that is neither NULL nor unaligned leads to as many numbers as `words` has.
unsafe fn copy(words: &mut [u64], from: *const i64) -> Option<()> {
    let from = readable(from)?;
    for (at, word) in words.iter_mut().enumerate() {
        // SAFETY: the caller's word.
        *word = unsafe { from.add(at).read() }.cast_unsigned();
    }
    Some(())
}

impl Key {
    /// The key of a call, unless something about it is out of the ordinary: then it is not kept.
    ///
    /// # Safety
    /// As rapt_attention().
    unsafe fn of(call: &Call) -> Option<Key> {
        let mut key = Key { words: [0; OPTION_WORDS + MOST_TENSORS * TENSOR_WORDS] };
        let (head, tensors) = key.words.split_at_mut(OPTION_WORDS);
        let mut places = tensors.chunks_exact_mut(TENSOR_WORDS);
        for tensor in [call.q, call.k, call.v, call.out] {
            // SAFETY: the caller's word.
            unsafe { Key::tensor(places.next()?, tensor) }?;
        }
        if call.options.is_null() {
            return Some(key);
        }
        // SAFETY: a struct of any version begins with its size.
        let size = unsafe { readable(call.options.cast::<usize>())?.read() };
        if size != size_of::<rapt_options>() {
            return None;
        }
        // SAFETY: as long as its size says.
        let options = unsafe { &*readable(call.options)? };
        // The bits of the numbers, so that NaN equals itself and −0 is not 0.
        head.copy_from_slice(&[
            1,
            pair(options.given.cast_signed(), options.causal),
            pair(options.layout, options.out_dtype),
            options.softmax_scale.to_bits(),
            options.softcap.to_bits(),
            options.window_left.cast_unsigned(),
            options.window_right.cast_unsigned(),
        ]);
        for tensor in [options.mask, options.sinks, options.alibi_slopes, options.lse] {
            let place = places.next()?;
            if !tensor.is_null() {
                // SAFETY: the caller's word. A tensor that is there has a device, so its words are not those of none.
                unsafe { Key::tensor(place, tensor) }?;
            }
        }
        Some(key)
    }

    /// # Safety
    /// As rapt_attention() for one of its tensors.
    unsafe fn tensor(words: &mut [u64], tensor: *const rapt_tensor) -> Option<()> {
        // SAFETY: the caller's word.
        let tensor = unsafe { &*readable(tensor)? };
        let rank = usize::try_from(tensor.ndim).ok().filter(|rank| *rank <= MOST_DIMS)?;
        let (head, dims) = words.split_at_mut(5);
        head.copy_from_slice(&[
            tensor.data as u64,
            pair(tensor.dtype, tensor.device),
            pair(tensor.device_index, tensor.ndim),
            tensor.storage_bytes.cast_unsigned(),
            tensor.storage as u64,
        ]);
        let (shape, strides) = dims.split_at_mut(MOST_DIMS);
        // SAFETY: as above: each leads to `ndim` numbers.
        unsafe { copy(&mut shape[..rank], tensor.shape)? };
        // SAFETY: as above.
        unsafe { copy(&mut strides[..rank], tensor.strides) }
    }
}

impl Hash for Key {
    /// By the addresses of q, k, v and out, in which calls of one program differ most.
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (0..4).for_each(|tensor| hasher.write_u64(self.words[OPTION_WORDS + tensor * TENSOR_WORDS]));
    }
}

/// What serving a call again takes.
struct Served {
    /// The tensors as they were then, proven against the spec of `plan`: they lead nowhere but through a call that says
    /// the same.
    operands: Operands<'static>,
    plan: Arc<Plan>,
}

/// The calls that an engine served.
pub(crate) struct Calls {
    served: CallCache<Key, Served>,
}

impl Calls {
    pub(crate) fn new() -> Self {
        Calls { served: CallCache::new(PLACES) }
    }

    /// Runs `call` on `engine`.
    ///
    /// # Safety
    /// As rapt_attention().
    pub(crate) unsafe fn run(&self, engine: &Engine, call: &Call) -> Result<(), Refusal> {
        // SAFETY: the caller's word.
        let key = unsafe { Key::of(call) };
        let run = |served: &mut Served| engine.run(&served.plan, &mut served.operands);
        if let Some(done) = key.as_ref().and_then(|key| self.served.with(key, run)) {
            return Ok(done?);
        }
        // SAFETY: the caller's word, for this call; a later one uses these tensors only if its own caller says the same.
        let (tensors, options) = unsafe { call.read() }?;
        let plan = engine.plan(&engine::spec_of(&tensors, &options)?)?;
        // SAFETY: the plan is never changed, and lives in its Arc for as long as the operands that borrow its spec.
        let spec = unsafe { &*std::ptr::from_ref(plan.spec()) };
        let mut operands = Operands::check(tensors, spec)?;
        engine.run(&plan, &mut operands)?;
        if let Some(key) = key {
            self.served.insert(key, Served { operands, plan });
        }
        Ok(())
    }
}
