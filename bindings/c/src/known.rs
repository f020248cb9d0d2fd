//! Calls that were seen before: their plan and their proof are kept, so that the next one runs at once.
//!
//! A proof is a function of what the caller's structs say, addresses included, and of nothing else: equal [`Key`]s have equal
//! proofs. A call whose structs say the same, word by word, as an earlier one that was served is therefore not proven again.
//! It is what a loop over the same buffers does; a call that was not seen takes the long way and is remembered.
//! Deliberately absent: anything of the tensors' contents, and refusals, which are found anew each time.

use std::array::from_fn;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use engine::{Engine, Operands, Plan};

use crate::abi::{rapt_options, rapt_tensor};
use crate::read::Call;
use crate::refusal::Refusal;

/// Calls that are remembered; each has one place, which its addresses choose.
const PLACES: usize = 64;
/// More dimensions are not served, so they are not remembered either.
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
    /// The key of a call, unless something about it is out of the ordinary: then it is not remembered.
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

    /// The place of this key: the addresses of q, k, v and out, mixed.
    fn place(&self) -> usize {
        let address = |tensor: usize| self.words[OPTION_WORDS + tensor * TENSOR_WORDS];
        // Multiplicative hashing: the high bits of a product with an odd number near 2^64 / φ.
        let mixed = (0..4)
            .fold(0u64, |mixed, tensor| (mixed.rotate_left(5) ^ address(tensor)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        (mixed >> (u64::BITS - PLACES.ilog2())) as usize
    }
}

/// A call that was served.
struct Served {
    key: Key,
    /// The tensors as they were then, proven against the spec of `plan`: they lead nowhere but through a call that says
    /// the same.
    operands: Operands<'static>,
    plan: Arc<Plan>,
}

/// What an engine remembers.
pub(crate) struct Known {
    places: [Mutex<Option<Box<Served>>>; PLACES],
}

impl Known {
    pub(crate) fn new() -> Self {
        Known { places: from_fn(|_| Mutex::new(None)) }
    }

    /// A place, unless another thread is using it.
    fn place(&self, key: &Key) -> Option<MutexGuard<'_, Option<Box<Served>>>> {
        match self.places[key.place()].try_lock() {
            Ok(place) => Some(place),
            // What lies there is whole at every moment.
            Err(TryLockError::Poisoned(place)) => Some(place.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Runs `call` on `engine`.
    ///
    /// # Safety
    /// As rapt_attention().
    pub(crate) unsafe fn run(&self, engine: &Engine, call: &Call) -> Result<(), Refusal> {
        // SAFETY: the caller's word.
        let key = unsafe { Key::of(call) };
        let mut place = key.as_ref().and_then(|key| self.place(key));
        if let (Some(key), Some(place)) = (&key, &mut place)
            && let Some(served) = place.as_mut().filter(|served| served.key == *key)
        {
            return Ok(engine.run(&served.plan, &mut served.operands)?);
        }
        // SAFETY: the caller's word, for this call; a later one uses these tensors only if its own caller says the same.
        let (tensors, options) = unsafe { call.read() }?;
        let plan = engine.plan(&engine::spec_of(&tensors, &options)?)?;
        // SAFETY: the plan is never changed, and lives in its Arc for as long as the operands that borrow its spec.
        let spec = unsafe { &*std::ptr::from_ref(plan.spec()) };
        let mut operands = Operands::check(tensors, spec)?;
        engine.run(&plan, &mut operands)?;
        if let (Some(key), Some(mut place)) = (key, place) {
            let served = Served { key, operands, plan };
            match place.as_mut() {
                Some(former) => **former = served,
                None => *place = Some(Box::new(served)),
            }
        }
        Ok(())
    }
}
