//! Calls that were served before: their plan and their proof are kept, so that the next one runs at once.
//!
//! A proof is a function of what the caller's structs say, addresses included, and of nothing else: equal [`Key`]s have equal
//! proofs. A call whose structs say the same, word by word, as an earlier one that was served is therefore not proven again.
//! It is what a loop over the same buffers does; any other call is proven, and kept in the engine's [`CallCache`].
//! Deliberately absent: anything of the tensors' contents, refusals, which are found anew each time, calls with a tolerance,
//! whose heads are judged each time, and calls with dropout, whose seeds differ.

use std::hash::{Hash, Hasher};
use std::mem::MaybeUninit;
use std::sync::Arc;

use engine::{CallCache, Engine, Operands, Plan};

use crate::abi::{rapt_codes, rapt_tensor};
use crate::read::{self, Call};
use crate::refusal::Refusal;
use crate::tolerance::Asked;

/// Calls that are kept.
const PLACES: usize = 64;
/// More dimensions are not served, so they are not kept either.
const MOST_DIMS: usize = 4;
/// q, k, v, out, mask, sinks, alibi_slopes, lse, and descale and zero point of q, k and v.
const MOST_TENSORS: usize = 14;
const TENSOR_WORDS: usize = 5 + 2 * MOST_DIMS;
const OPTION_WORDS: usize = 8;
/// Those of a rapt_codes, without its tensors.
const CODES_WORDS: usize = 5;
const MOST_WORDS: usize = OPTION_WORDS + MOST_TENSORS * TENSOR_WORDS + 3 * CODES_WORDS;

/// What a call's structs say, word by word.
///
/// Data layout: the options, the first word of which says which of the others are there; then each tensor and each rapt_codes
/// that is. So no two calls have the same words, and a call writes and compares no more than it has: of 1.6 KB a plain one 472
/// bytes, which is why the rest is not even set to 0.
struct Key {
    /// The first `len` of them were written.
    words: [MaybeUninit<u64>; MOST_WORDS],
    len: usize,
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
    fn new() -> Key {
        Key { words: [MaybeUninit::uninit(); MOST_WORDS], len: 0 }
    }

    /// Makes it the key of a call, unless something about that is out of the ordinary: then it is not kept.
    ///
    /// # Safety
    /// As rapt_attention().
    unsafe fn write(&mut self, call: &Call) -> Option<()> {
        self.next(OPTION_WORDS)?;
        for tensor in [call.q, call.k, call.v, call.out] {
            // SAFETY: the caller's word.
            unsafe { self.tensor(tensor) }?;
        }
        if call.options.is_null() {
            return Some(());
        }
        // SAFETY: the caller's word.
        let options = unsafe { read::options(call.options) }.ok()?;
        // A seed is not given twice.
        let numbers = options.dropout_seed != 0 || options.dropout_offset != 0 || !options.dropout_draw.is_null();
        let drops = options.dropout_p != 0.0 || numbers;
        if drops || !options.tolerance.is_null() {
            return None;
        }
        let mut present = 1;
        for (n, tensor) in [options.mask, options.sinks, options.alibi_slopes, options.lse].into_iter().enumerate() {
            if !tensor.is_null() {
                present |= 1 << (1 + n);
                // SAFETY: the caller's word.
                unsafe { self.tensor(tensor) }?;
            }
        }
        for (n, codes) in [options.q_codes, options.k_codes, options.v_codes].into_iter().enumerate() {
            if !codes.is_null() {
                present |= 1 << (5 + n);
                // SAFETY: the caller's word.
                unsafe { self.codes(codes) }?;
            }
        }
        // The bits of the numbers, so that NaN equals itself and −0 is not 0.
        self.words[..OPTION_WORDS].write_copy_of_slice(&[
            present,
            pair(options.given.cast_signed(), options.causal),
            pair(options.layout, options.out_dtype),
            options.softmax_scale.to_bits(),
            options.softcap.to_bits(),
            options.window_left.cast_unsigned(),
            options.window_right.cast_unsigned(),
            u64::from(options.compute.cast_unsigned()),
        ]);
        Some(())
    }

    /// The words that were written.
    fn words(&self) -> &[u64] {
        // SAFETY: `next` wrote them.
        unsafe { self.words[..self.len].assume_init_ref() }
    }

    /// The next `count` words, all 0.
    fn next(&mut self, count: usize) -> Option<&mut [u64]> {
        let words = self.words.get_mut(self.len..self.len + count)?;
        self.len += count;
        words.fill(MaybeUninit::new(0));
        // SAFETY: each was just written.
        Some(unsafe { words.assume_init_mut() })
    }

    /// # Safety
    /// As rapt_attention() for one of its tensors.
    unsafe fn tensor(&mut self, tensor: *const rapt_tensor) -> Option<()> {
        // SAFETY: the caller's word.
        let tensor = unsafe { &*readable(tensor)? };
        let rank = usize::try_from(tensor.ndim).ok().filter(|rank| *rank <= MOST_DIMS)?;
        let (head, dims) = self.next(TENSOR_WORDS)?.split_at_mut(5);
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

    /// # Safety
    /// As rapt_attention() for one of its rapt_codes.
    unsafe fn codes(&mut self, codes: *const rapt_codes) -> Option<()> {
        let codes = readable(codes)?;
        // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
        if unsafe { (*codes).size } != size_of::<rapt_codes>() {
            return None;
        }
        // SAFETY: as long as its size says.
        let codes = unsafe { codes.read() };
        let is_scaled = !codes.global_scale.is_null();
        // SAFETY: the caller's word: a number lies there.
        let global_scale = if is_scaled { unsafe { readable(codes.global_scale)?.read() } } else { 0.0 };
        let has_zero_point = !codes.zero_point.is_null();
        self.next(CODES_WORDS)?.copy_from_slice(&[
            pair(codes.format, codes.granularity),
            codes.block_size.cast_unsigned(),
            codes.head_dim.cast_unsigned(),
            u64::from(global_scale.to_bits()) | u64::from(is_scaled) << 32 | u64::from(has_zero_point) << 33,
            u64::from(codes.scale_layout.cast_unsigned()),
        ]);
        // SAFETY: the caller's word. Without a descale the call is refused, and not kept.
        unsafe { self.tensor(codes.descale) }?;
        // SAFETY: the caller's word.
        if has_zero_point { unsafe { self.tensor(codes.zero_point) } } else { Some(()) }
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.words() == other.words()
    }
}

impl Eq for Key {}

impl Hash for Key {
    /// By the addresses of q, k, v and out, in which calls of one program differ most.
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (0..4).for_each(|tensor| hasher.write_u64(self.words()[OPTION_WORDS + tensor * TENSOR_WORDS]));
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
        let mut key = Key::new();
        // SAFETY: the caller's word.
        let is_kept = unsafe { key.write(call) }.is_some();
        let run = |served: &mut Served| engine.run(&served.plan, &mut served.operands);
        if is_kept && let Some(done) = self.served.with(&key, run) {
            return Ok(done?);
        }
        // SAFETY: the caller's word, for this call; a later one uses these tensors only if its own caller says the same.
        let (tensors, options) = unsafe { call.read() }?;
        // SAFETY: the caller's word.
        if let Some(asked) = unsafe { Asked::of(call) }? {
            // SAFETY: as above.
            return unsafe { asked.run(engine, tensors, &options) };
        }
        let plan = engine.plan(&engine::spec_of(&tensors, &options)?)?;
        // SAFETY: the plan is never changed, and lives in its Arc for as long as the operands that borrow its spec.
        let spec = unsafe { &*std::ptr::from_ref(plan.spec()) };
        let mut operands = Operands::check(tensors, spec)?;
        engine.run(&plan, &mut operands)?;
        if is_kept {
            self.served.insert(key, Served { operands, plan });
        }
        Ok(())
    }
}
