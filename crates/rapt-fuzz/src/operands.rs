//! Tensors in one arena: what `Operands` proves is found again address by address, and a run writes out and lse and nothing else.
//!
//! Data layout: an arena of [`ARENA`] bytes, each tensor at an offset of its own, in a gap between its neighbours or across
//! them. Every element of the arena is a finite number whatever dtype reads it.

use arbitrary::{Result as Parsed, Unstructured};
use rapt::{Device, Engine, Error, Executor, Extent, Operands, Queue, Result, SerialExecutor, Tensors, View, ViewMut};
use std::sync::OnceLock;

use crate::arbitrary::{Request, Scale, TensorDesc};
use crate::check_refusal;
use crate::explain::spec_of;

/// Bytes of the arena.
pub(crate) const ARENA: usize = 1 << 12;

/// Whether the bytes describe operands that are accepted.
///
/// # Panics
/// If a proof does not hold, or a run reads or writes what is not its own.
#[must_use]
pub fn operands(data: &[u8]) -> bool {
    let mut u = Unstructured::new(data);
    let Ok((request, offsets)) = parse(&mut u) else { return false };
    match run(&request, offsets) {
        Ok(()) => true,
        Err(error) => {
            check_refusal(&error);
            false
        }
    }
}

pub(crate) type Offsets = [usize; 8];

/// The descs in the order of their offsets.
pub(crate) fn descs(request: &Request) -> [Option<&TensorDesc>; 8] {
    let Request { q, k, v, mask, sinks, alibi_slopes, out, lse, .. } = request;
    [Some(q), Some(k), Some(v), mask.as_ref(), sinks.as_ref(), alibi_slopes.as_ref(), Some(out), lse.as_ref()]
}

/// The bytes reached, relative to element 0, where that is a small number.
pub(crate) fn reach(desc: &TensorDesc) -> Option<(usize, usize)> {
    if desc.shape.contains(&0) {
        return Some((0, 0));
    }
    let (mut before, mut after) = (0usize, 1usize);
    for (&n, &stride) in desc.shape.iter().zip(desc.strides.iter()) {
        let span = (n - 1).checked_mul(stride.unsigned_abs())?;
        if stride < 0 { before = before.checked_add(span)? } else { after = after.checked_add(span)? }
    }
    let size = desc.dtype.size_bytes();
    Some((before.checked_mul(size)?, after.checked_mul(size)?))
}

/// Where a tensor lies: mostly behind the others, which end at `end`.
pub(crate) fn place(u: &mut Unstructured<'_>, desc: &TensorDesc, end: &mut usize) -> Parsed<usize> {
    let size = desc.dtype.size_bytes().max(1);
    let (before, after) = reach(desc).unwrap_or((0, 0));
    let start = end.next_multiple_of(size) + before.next_multiple_of(size);
    let at = match u.int_in_range(0..=15u8)? {
        // Anywhere, over others too.
        14 => usize::from(u.arbitrary::<u16>()?) / size * size % ARENA,
        15 => usize::from(u.arbitrary::<u16>()?) % ARENA,
        // Between the elements of the tensor before.
        13 => start.saturating_sub(size * usize::from(u.arbitrary::<u8>()?)),
        _ => start,
    };
    *end = (*end).max(at.saturating_add(after));
    Ok(at)
}

pub(crate) fn parse(u: &mut Unstructured<'_>) -> Parsed<(Request, Offsets)> {
    let request = Request::new(u, Scale::Small)?;
    let mut offsets = [0; 8];
    let mut end = 0usize;
    for (offset, desc) in offsets.iter_mut().zip(descs(&request)) {
        let Some(desc) = desc else { continue };
        *offset = place(u, desc, &mut end)?;
    }
    Ok((request, offsets))
}

/// Memory in which all tensors of a request lie.
pub(crate) struct Arena {
    base: *mut u8,
    // Words: aligned for every dtype. Reached through `base` alone.
    _words: Vec<u64>,
}

impl Arena {
    pub(crate) fn new() -> Self {
        let mut words = filled().to_vec();
        Arena { base: words.as_mut_ptr().cast(), _words: words }
    }

    fn extent(&self) -> Extent {
        Extent::Proven { address: self.base as usize, len_bytes: ARENA }
    }

    pub(crate) fn view(&self, tensor: &'static str, desc: &TensorDesc, at: usize) -> Result<View<'_>> {
        let TensorDesc { dtype, shape, strides } = *desc;
        let ptr = self.base.wrapping_add(at);
        // SAFETY: the extent is that of the arena, whose bytes are initialised and valid in every dtype (0 or 1 each);
        // outputs that meet an input are refused before anything is read or written.
        unsafe { View::from_raw_parts(tensor, ptr, dtype, shape, strides, Device::Cpu, self.extent()) }
    }

    pub(crate) fn view_mut(&self, tensor: &'static str, desc: &TensorDesc, at: usize) -> Result<ViewMut<'_>> {
        let TensorDesc { dtype, shape, strides } = *desc;
        let ptr = self.base.wrapping_add(at);
        // SAFETY: as above; the memory is that of a vector that nothing reads or writes but through such views.
        unsafe { ViewMut::from_raw_parts(tensor, ptr, dtype, shape, strides, Device::Cpu, self.extent()) }
    }

    pub(crate) fn optional(&self, of: &Placed<'_>) -> Result<Option<View<'_>>> {
        of.desc.map(|desc| self.view(of.tensor, desc, of.at)).transpose()
    }

    pub(crate) fn optional_mut(&self, of: &Placed<'_>) -> Result<Option<ViewMut<'_>>> {
        of.desc.map(|desc| self.view_mut(of.tensor, desc, of.at)).transpose()
    }

    fn contents(&self) -> Vec<u8> {
        contents(self.base)
    }

    /// That `run`, which is accepted, writes `written` and nothing else, all of it, and reads none of it.
    pub(crate) fn check_run(&self, written: &Bytes, mut run: impl FnMut() -> Result<()>) -> Result<()> {
        let before = self.contents();
        run()?;
        let now = self.contents();
        // With the outputs put back, everything is as before.
        let mut restored = now.clone();
        written.each(|at| restored[at] = before[at]);
        assert!(restored == before, "a byte outside the outputs was written");
        // Outputs filled otherwise before the run come out the same: every byte of them is written, and none is read.
        written.each(|at| {
            // SAFETY: inside the arena; no view is read meanwhile.
            unsafe { self.base.add(at).write(!now[at]) }
        });
        run()?;
        assert!(self.contents() == now, "the same bits twice, wherever the outputs started from");
        Ok(())
    }
}

/// A tensor of a request, and where it lies in the arena; without a desc it is not there.
#[derive(Clone, Copy)]
pub(crate) struct Placed<'a> {
    pub(crate) tensor: &'static str,
    pub(crate) desc: Option<&'a TensorDesc>,
    pub(crate) at: usize,
}

impl Placed<'_> {
    fn bytes(&self) -> Option<Bytes> {
        self.desc.map(|desc| Bytes::of(desc, self.at))
    }
}

/// What is written, of outputs that were accepted beside `inputs`.
pub(crate) fn written(inputs: &[Placed<'_>], outputs: &[Placed<'_>]) -> Bytes {
    let mut written = Bytes::none();
    for (set, desc) in outputs.iter().filter_map(|of| of.bytes().zip(of.desc)) {
        assert_eq!(set.count(), numel(desc) * desc.dtype.size_bytes(), "injective");
        assert!(!set.meets(&written), "the outputs apart");
        written.add(&set);
    }
    assert!(inputs.iter().filter_map(Placed::bytes).all(|set| !set.meets(&written)), "inputs apart from outputs");
    written
}

fn run(request: &Request, offsets: Offsets) -> Result<()> {
    const NAMES: [&str; 8] = ["q", "k", "v", "mask", "sinks", "alibi_slopes", "out", "lse"];
    let sets = descs(request);
    let placed: [Placed<'_>; 8] = std::array::from_fn(|n| Placed { tensor: NAMES[n], desc: sets[n], at: offsets[n] });
    let [q, k, v, mask, sinks, alibi_slopes, out, lse] = &placed;
    let arena = Arena::new();
    let tensors = || -> Result<Tensors<'_>> {
        Ok(Tensors {
            mask: arena.optional(mask)?,
            sinks: arena.optional(sinks)?,
            alibi_slopes: arena.optional(alibi_slopes)?,
            lse: arena.optional_mut(lse)?,
            ..Tensors::new(
                arena.view("q", &request.q, q.at)?,
                arena.view("k", &request.k, k.at)?,
                arena.view("v", &request.v, v.at)?,
                arena.view_mut("out", &request.out, out.at)?,
            )
        })
    };
    let first = tensors()?;
    let spec = spec_of(&first, request)?;
    // Every view was built, so each of its bytes lies in the arena.
    let checked = match Operands::check(first, &spec) {
        Ok(checked) => checked,
        Err(error) => {
            check_overlap(&error, &placed);
            return Err(error);
        }
    };
    let written = written(&placed[..6], &placed[6..]);
    let engine = engine();
    let plan = engine.plan_for(&spec, 1)?;
    let certificate = plan.certificate(&checked)?;
    assert!(certificate.is_proven(), "the arena is known");
    assert_eq!(certificate.injective[0].elements, numel(&request.out) as u128);
    drop(checked);
    let queue = Queue::Host(&SerialExecutor as &dyn Executor);
    arena.check_run(&written, || engine.run_on(&plan, &mut Operands::check(tensors()?, &spec)?, &queue))
}

fn numel(desc: &TensorDesc) -> usize {
    desc.shape.iter().product()
}

/// A refusal for overlap is a real one.
pub(crate) fn check_overlap(error: &Error, all: &[Placed<'_>]) {
    let of = |name: &str| all.iter().find(|of| of.tensor == name).expect("an operand");
    let bytes = |name: &str| of(name).bytes().expect("a tensor that is there");
    match error {
        Error::OutputOverlaps { tensor, other } => {
            assert!(bytes(tensor).meets(&bytes(other)), "{tensor} and {other} share no byte");
        }
        Error::OutputOverlapsItself { tensor, .. } => {
            let desc = of(tensor).desc.expect("a tensor that is there");
            assert!(bytes(tensor).count() < numel(desc) * desc.dtype.size_bytes(), "{tensor} is injective");
        }
        Error::OverlapUndecided { tensor, .. } => panic!("a small case is undecided: {tensor}, {:?}", of(tensor).desc),
        _ => {}
    }
}

const WORDS: usize = ARENA / 64;

/// A set of bytes of the arena, found without any of rapt-core's arithmetic.
#[derive(Clone)]
pub(crate) struct Bytes([u64; WORDS]);

impl Bytes {
    pub(crate) fn none() -> Self {
        Bytes([0; WORDS])
    }

    /// Every byte of every element.
    pub(crate) fn of(desc: &TensorDesc, at: usize) -> Self {
        let mut set = Bytes::none();
        if desc.shape.contains(&0) {
            return set;
        }
        let size = desc.dtype.size_bytes();
        // From the lowest address up, so that no step leaves the arena on the way.
        let (below, _) = reach(desc).expect("inside the arena");
        set.0[(at - below) / 64] |= 1 << ((at - below) % 64);
        let steps = desc.shape.iter().zip(desc.strides.iter()).map(|(&n, stride)| (n, stride.unsigned_abs() * size));
        for (n, step) in steps.chain([(size, 1)]).filter(|(n, step)| *n > 1 && *step > 0) {
            let one = set.clone();
            (1..n).for_each(|i| set.add(&one.moved(i * step)));
        }
        set
    }

    fn moved(&self, by: usize) -> Self {
        let (words, bits) = (by / 64, by % 64);
        let from = |at: Option<usize>| at.map_or(0, |at| self.0[at]);
        Bytes(std::array::from_fn(|at| {
            let low = from(at.checked_sub(words)) << bits;
            let carry = if bits == 0 { 0 } else { from(at.checked_sub(words + 1)) >> (64 - bits) };
            low | carry
        }))
    }

    pub(crate) fn add(&mut self, other: &Bytes) {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
    }

    fn meets(&self, other: &Bytes) -> bool {
        self.0.iter().zip(other.0).any(|(word, other)| word & other != 0)
    }

    pub(crate) fn each(&self, mut visit: impl FnMut(usize)) {
        for (at, &word) in self.0.iter().enumerate() {
            let mut rest = word;
            while rest != 0 {
                visit(64 * at + rest.trailing_zeros() as usize);
                rest &= rest - 1;
            }
        }
    }

    fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}

pub(crate) fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::new(Some(1)).expect("one thread, and the instruction set of this machine"))
}

/// Each byte is 0 or 1 (a bool), and each number that any dtype reads from them is tiny and finite.
pub(crate) fn filled() -> &'static [u64] {
    static FILLED: OnceLock<Vec<u64>> = OnceLock::new();
    let word = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) & 0x0101_0101_0101_0101;
    FILLED.get_or_init(|| (0..ARENA as u64 / 8).map(word).collect())
}

pub(crate) fn contents(base: *const u8) -> Vec<u8> {
    // SAFETY: the arena, alive in the caller; no output is being written.
    unsafe { std::slice::from_raw_parts(base, ARENA) }.to_vec()
}
