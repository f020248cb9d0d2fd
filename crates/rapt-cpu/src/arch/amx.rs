//! Tiles of bf16: Intel's AMX, and a model of it in plain Rust.
//!
//! ```text
//! c[i][j] += Σ_l a[i][l]·b[l][j]      a lane l holds two steps of the contraction; 16 rows i, 16 columns j, 16 lanes l
//! ```
//! A tile is 16 rows of 64 bytes: of bf16 pairs (`a` along its rows, `b` along its columns) or of f32 sums. As the unit has it
//! (Intel's Instruction Set Extensions Reference, TDPBF16PS): of each row and column the sixteen products of the first steps are summed by
//! fused multiply-adds from 0 on, those of the second steps too, both sums are added, and that is added to `c`; numbers
//! below the least normal one are read and written as 0. [`Model`](Unit::Model) is these sentences, for machines without the unit.
//! Deliberately absent: what tiles are made of and what becomes of them.

use std::sync::atomic::{AtomicBool, Ordering};

/// Rows of a tile, columns of its sums, and lanes of a row of pairs.
pub(crate) const SIDE: usize = 16;
/// Elements of a tile, counted as f32.
pub(crate) const TILE: usize = SIDE * SIDE;

/// What multiplies tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// The processor's own.
    Amx,
    /// Plain Rust.
    Model,
}

static IS_MODELLED: AtomicBool = AtomicBool::new(false);

/// Whether the model is to multiply from now on.
pub(crate) fn model(is_modelled: bool) {
    IS_MODELLED.store(is_modelled, Ordering::Relaxed);
}

/// What multiplies.
pub(crate) fn unit() -> Unit {
    if IS_MODELLED.load(Ordering::Relaxed) { Unit::Model } else { Unit::Amx }
}

/// Whether the processor has the unit and the system lets this process use it: asked once, since the answer holds for every thread
/// and every forked child. Linux refuses where a thread's signal stack has no room for tiles.
#[cfg(target_os = "linux")]
pub(crate) fn is_usable() -> bool {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::OnceLock;

    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    static IS_USABLE: OnceLock<bool> = OnceLock::new();
    *IS_USABLE.get_or_init(|| {
        const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
        let has_instructions = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BF16_AND_TILES == BF16_AND_TILES;
        // The system saves the state of the processor by XSAVE: then XGETBV is there.
        let has_xsave = __cpuid(1).ecx & 1 << 27 != 0;
        if !has_instructions || !has_xsave {
            return false;
        }
        let (low, answer): (u32, i64);
        // SAFETY: XGETBV is there and reads a register of the system.
        unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack)) };
        const BOTH_STATES: u32 = 3 << 17;
        if low & BOTH_STATES != BOTH_STATES {
            return false;
        }
        // SAFETY: a call of the system that lets this process use tiles, or refuses; it touches no memory of ours.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") ARCH_PRCTL => answer,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack)
            );
        }
        answer == 0
    })
}

/// Nobody has asked another system for tiles.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_usable() -> bool {
    false
}

/// The form of all tiles, as LDTILECFG reads it.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = {
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = 64;
        config.rows[tile] = SIDE as u8;
        tile += 1;
    }
    config
};

/// This thread's tiles, as long as it lives. No other code of this thread uses them meanwhile: an item of work calls nobody.
pub(crate) struct Tiles(Unit);

impl Tiles {
    /// Gives the tiles their form: 50 ns (Xeon with AMX, 2026-11).
    ///
    /// # Safety
    /// [`unit`] is there.
    pub(crate) unsafe fn new() -> Tiles {
        let unit = unit();
        if unit == Unit::Amx {
            // SAFETY: the caller vouches for the unit; CONFIG is a form that it knows.
            unsafe { std::arch::asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(readonly, nostack)) };
        }
        Tiles(unit)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        if self.0 == Unit::Amx {
            // SAFETY: `new` saw the unit. Without a form there is no state for the system to save.
            unsafe { std::arch::asm!("tilerelease", options(nomem, nostack)) };
        }
    }
}

/// Tiles in memory: the first one, from one to the next, and from one of a tile's rows to the next, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct InMemory<P> {
    pub(crate) ptr: P,
    /// From one tile to the next along the rows of `a` and `c`, or the columns of `b`.
    pub(crate) next: usize,
    /// From one tile to the next along the contraction, or the columns of `c`.
    pub(crate) along: usize,
    /// From one part of the numbers of a tile to the next.
    pub(crate) part: usize,
    pub(crate) row: usize,
}

impl InMemory<*const u8> {
    /// The tile of a part, `steps` along the contraction.
    #[inline(always)]
    fn at(self, steps: usize, part: usize) -> Self {
        InMemory { ptr: self.ptr.wrapping_add(steps * self.along + part * self.part), ..self }
    }
}

/// Which parts of the numbers of `a` and of `b` are multiplied with one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parts {
    /// Numbers have one.
    Whole,
    /// All four of two and two.
    Four,
    /// Of two and two, all but the smallest.
    Three,
    /// Of three and three, the six largest.
    Six,
}

impl Parts {
    /// Part of `a`, part of `b`, the first being the largest: in the order in which they are summed, such that each tile of `a` is loaded once.
    const fn pairs(self) -> &'static [[usize; 2]] {
        match self {
            Parts::Whole => &[[0, 0]],
            Parts::Four => &[[1, 1], [1, 0], [0, 0], [0, 1]],
            Parts::Three => &[[1, 0], [0, 0], [0, 1]],
            Parts::Six => &[[2, 0], [1, 0], [1, 1], [0, 1], [0, 2], [0, 0]],
        }
    }
}

/// What is multiplied: `steps` tiles along the contraction.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) a: InMemory<*const u8>,
    pub(crate) b: InMemory<*const u8>,
    pub(crate) c: InMemory<*mut u8>,
    pub(crate) steps: usize,
    pub(crate) parts: Parts,
    /// Whether the sums begin at 0, not at what `c` holds.
    pub(crate) from_zero: bool,
}

impl Operands {
    /// The same from a later row of tiles on.
    pub(crate) fn rows_from(&self, row: usize) -> Operands {
        let a = InMemory { ptr: self.a.ptr.wrapping_add(row * self.a.next), ..self.a };
        let c = InMemory { ptr: self.c.ptr.wrapping_add(row * self.c.next), ..self.c };
        Operands { a, c, ..*self }
    }
}

/// `R` rows of tiles times `C` columns of tiles, at most 2 × 2 or 1 × 4.
///
/// # Safety
/// [`Tiles`] live on this thread; all tiles of `a` and `b` are readable, those of `c` readable and writable.
#[inline(always)]
pub(crate) unsafe fn multiply<const R: usize, const C: usize>(unit: Unit, operands: &Operands) {
    // SAFETY: as of the caller.
    unsafe {
        match unit {
            Unit::Amx => by_amx::<R, C>(operands),
            Unit::Model => by_model::<R, C>(operands),
        }
    }
}

/// An instruction between a tile, which the compiler does not know, and memory.
macro_rules! tile_memory {
    ($instruction:literal, $tile:literal, $ptr:expr, $row:expr) => {
        std::arch::asm!(
            $instruction, in(reg) $ptr, in(reg) $row, tile = const $tile, options(nostack, preserves_flags)
        )
    };
}

macro_rules! load {
    ($tile:literal, $ptr:expr, $row:expr) => {
        tile_memory!("tileloadd tmm{tile}, [{0} + {1}]", $tile, $ptr, $row)
    };
}

macro_rules! store {
    ($tile:literal, $ptr:expr, $row:expr) => {
        tile_memory!("tilestored [{0} + {1}], tmm{tile}", $tile, $ptr, $row)
    };
}

macro_rules! dot {
    ($c:literal, $a:literal, $b:literal) => {
        std::arch::asm!(
            "tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const $c, a = const $a, b = const $b,
            options(nomem, nostack, preserves_flags)
        )
    };
}

/// Tiles 0 to 3 are sums, 4 and 5 those of `a`, 6 and 7 those of `b`. Four loads for four products keep 80 % of the rate of products
/// alone (2.65 of 3.3 TFLOP/s of a core, Xeon with AMX, 2026-11); loads of tiles whose rows lie across cache lines take ten times as long.
#[inline(always)]
unsafe fn by_amx<const R: usize, const C: usize>(operands: &Operands) {
    // SAFETY: as of the caller.
    unsafe {
        begin::<R, C>(operands);
        for at in 0..operands.steps {
            step::<R, C>(operands, at);
        }
        end::<R, C>(operands);
    }
}

/// Where the sums of a row and a column of tiles are.
fn sums(operands: &Operands, i: usize, j: usize) -> *mut u8 {
    operands.c.ptr.wrapping_add(i * operands.c.next + j * operands.c.along)
}

/// The sums as they are before the first step.
///
/// # Safety
/// As of [`multiply`] by [`Unit::Amx`].
#[inline(always)]
pub(crate) unsafe fn begin<const R: usize, const C: usize>(operands: &Operands) {
    const { assert!((R <= 2 && C <= 2) || (R == 1 && C == 4)) };
    let row = operands.c.row;
    // SAFETY: as of the caller.
    unsafe {
        if operands.from_zero {
            std::arch::asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nomem, nostack)
            );
            return;
        }
        load!(0, sums(operands, 0, 0), row);
        if C > 1 {
            load!(1, sums(operands, 0, 1), row);
        }
        if R > 1 {
            load!(2, sums(operands, 1, 0), row);
        }
        if R > 1 && C > 1 {
            load!(3, sums(operands, 1, 1), row);
        }
        if C > 2 {
            load!(2, sums(operands, 0, 2), row);
            load!(3, sums(operands, 0, 3), row);
        }
    }
}

/// One step along the contraction.
///
/// # Safety
/// As of [`begin`], which came before.
#[inline(always)]
pub(crate) unsafe fn step<const R: usize, const C: usize>(operands: &Operands, at: usize) {
    let (a, b) = (operands.a.at(at, 0), operands.b.at(at, 0));
    // SAFETY: as of the caller.
    unsafe {
        match operands.parts {
            Parts::Whole => pair::<R, C>(a, b, true, true),
            Parts::Four => pairs::<R, C>(a, b, const { Parts::Four.pairs() }),
            Parts::Three => pairs::<R, C>(a, b, const { Parts::Three.pairs() }),
            Parts::Six => pairs::<R, C>(a, b, const { Parts::Six.pairs() }),
        }
    }
}

/// All pairs of parts of a step. What one had in tiles stays there for the next.
#[inline(always)]
unsafe fn pairs<const R: usize, const C: usize>(
    a: InMemory<*const u8>,
    b: InMemory<*const u8>,
    pairs: &'static [[usize; 2]],
) {
    let (mut last_a, mut last_b) = (usize::MAX, usize::MAX);
    for &[of_a, of_b] in pairs {
        // SAFETY: as of the caller.
        unsafe { pair::<R, C>(a.at(0, of_a), b.at(0, of_b), of_a != last_a, of_b != last_b || C > 2) };
        (last_a, last_b) = (of_a, of_b);
    }
}

/// One pair of parts.
#[inline(always)]
unsafe fn pair<const R: usize, const C: usize>(
    a: InMemory<*const u8>,
    b: InMemory<*const u8>,
    loads_a: bool,
    loads_b: bool,
) {
    // SAFETY: as of the caller.
    unsafe {
        if loads_a {
            load!(4, a.ptr, a.row);
        }
        if loads_b {
            load!(6, b.ptr, b.row);
        }
        dot!(0, 4, 6);
        if C > 1 {
            if loads_b {
                load!(7, b.ptr.wrapping_add(b.next), b.row);
            }
            dot!(1, 4, 7);
        }
        if R > 1 {
            if loads_a {
                load!(5, a.ptr.wrapping_add(a.next), a.row);
            }
            dot!(2, 5, 6);
        }
        if R > 1 && C > 1 {
            dot!(3, 5, 7);
        }
        if C > 2 {
            load!(6, b.ptr.wrapping_add(2 * b.next), b.row);
            dot!(2, 4, 6);
            load!(7, b.ptr.wrapping_add(3 * b.next), b.row);
            dot!(3, 4, 7);
        }
    }
}

/// The sums to where they belong.
///
/// # Safety
/// As of [`begin`], which came before.
#[inline(always)]
pub(crate) unsafe fn end<const R: usize, const C: usize>(operands: &Operands) {
    let row = operands.c.row;
    // SAFETY: as of the caller.
    unsafe {
        store!(0, sums(operands, 0, 0), row);
        if C > 1 {
            store!(1, sums(operands, 0, 1), row);
        }
        if R > 1 {
            store!(2, sums(operands, 1, 0), row);
        }
        if R > 1 && C > 1 {
            store!(3, sums(operands, 1, 1), row);
        }
        if C > 2 {
            store!(2, sums(operands, 0, 2), row);
            store!(3, sums(operands, 0, 3), row);
        }
    }
}

/// `rounds` times four products of one tile of `x` with one of `y`, into four tiles of sums; the sum of those (see `ceiling`).
///
/// # Safety
/// [`unit`] is there.
pub(crate) unsafe fn rounds(rounds: usize, x: f32, y: f32) -> f32 {
    let pairs = |of: f32| {
        let bits = u32::from(half::bf16::from_f32(of).to_bits());
        [bits << 16 | bits; TILE]
    };
    let (a, b, mut c) = (pairs(x), pairs(y), [0f32; 4 * TILE]);
    let (side, tile) = (SIDE * 4, TILE * 4);
    let operands = Operands {
        a: InMemory { ptr: a.as_ptr().cast(), next: 0, along: 0, part: 0, row: side },
        b: InMemory { ptr: b.as_ptr().cast(), next: 0, along: 0, part: 0, row: side },
        c: InMemory { ptr: c.as_mut_ptr().cast(), next: 0, along: tile, part: 0, row: side },
        steps: rounds,
        parts: Parts::Whole,
        from_zero: true,
    };
    // SAFETY: the tiles are those above, and the caller vouches for the unit.
    unsafe {
        let Tiles(unit) = &Tiles::new();
        match unit {
            Unit::Amx => {
                begin::<1, 4>(&operands);
                load!(4, operands.a.ptr, side);
                load!(6, operands.b.ptr, side);
                for _ in 0..rounds {
                    dot!(0, 4, 6);
                    dot!(1, 4, 6);
                    dot!(2, 4, 6);
                    dot!(3, 4, 6);
                }
                end::<1, 4>(&operands);
            }
            Unit::Model => by_model::<1, 4>(&operands),
        }
    }
    c.iter().sum()
}

/// As the module says; by the fused products of a processor that has them, as calls for each took most of a test's time.
///
/// # Safety
/// As of [`multiply`].
#[inline(never)]
unsafe fn by_model<const R: usize, const C: usize>(operands: &Operands) {
    #[target_feature(enable = "avx2,fma")]
    unsafe fn fused<const R: usize, const C: usize>(operands: &Operands) {
        // SAFETY: as of the caller.
        unsafe { in_order::<R, C>(operands) }
    }
    let has_fused = std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
    // SAFETY: as of the caller, and the processor has what `fused` asks for.
    unsafe { if has_fused { fused::<R, C>(operands) } else { in_order::<R, C>(operands) } }
}

/// Row by row of each tile, all columns at once.
///
/// # Safety
/// As of [`multiply`].
#[inline(always)]
unsafe fn in_order<const R: usize, const C: usize>(operands: &Operands) {
    let Operands { a, b, c, steps, parts, from_zero } = *operands;
    let halves = |pair: u32| [pair << 16, pair & 0xFFFF_0000].map(|bits| normal(f32::from_bits(bits)));
    for (i, j, row) in (0..R).flat_map(|i| (0..C).flat_map(move |j| (0..SIDE).map(move |row| (i, j, row)))) {
        let place = c.ptr.wrapping_add(i * c.next + j * c.along + row * c.row).cast::<[f32; SIDE]>();
        // SAFETY: `place` has the SIDE sums of a row, which the caller vouches for.
        let mut sums = if from_zero { [0.0; SIDE] } else { unsafe { place.read_unaligned() } };
        for (step, &[of_a, of_b]) in (0..steps).flat_map(|step| parts.pairs().iter().map(move |pair| (step, pair))) {
            let (mut first, mut second) = ([0.0f32; SIDE], [0.0f32; SIDE]);
            let (a, b) = (a.at(step, of_a), b.at(step, of_b));
            for lane in 0..SIDE {
                let of_a = a.ptr.wrapping_add(i * a.next + row * a.row + lane * 4).cast::<u32>();
                let of_b = b.ptr.wrapping_add(j * b.next + lane * b.row).cast::<[u32; SIDE]>();
                // SAFETY: as above.
                let (of_a, of_b) = unsafe { (of_a.read_unaligned(), of_b.read_unaligned()) };
                let [a0, a1] = halves(of_a);
                for column in 0..SIDE {
                    let [b0, b1] = halves(of_b[column]);
                    first[column] = normal(a0.mul_add(b0, first[column]));
                    second[column] = normal(a1.mul_add(b1, second[column]));
                }
            }
            for column in 0..SIDE {
                sums[column] = normal(normal(sums[column]) + normal(first[column] + second[column]));
            }
        }
        // SAFETY: as above.
        unsafe { place.write_unaligned(sums) };
    }
}

/// 0 of its sign in place of a number below the least normal one.
#[inline(always)]
fn normal(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0f32.copysign(x) } else { x }
}
