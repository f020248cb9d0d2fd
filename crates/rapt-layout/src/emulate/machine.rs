//! Three memories and the two things that instructions do with them.

use half::{bf16, f16};

use crate::check::Side;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::unit::{Place, Space, TMEM_COLUMNS, TMEM_LANES};

/// 32-bit registers of a thread.
const REGISTERS: i64 = 256;
/// Threads of a block that is emulated: four warps.
const THREADS: i64 = 128;
/// Bytes of shared memory: what a block may hold on Hopper and Blackwell.
const SHARED_BYTES: i64 = 227 * 1024;

/// Words, and which of their bits were written.
#[derive(Clone, Debug)]
struct Memory {
    space: Space,
    /// Words in a lane or a thread; all of shared memory is one row.
    row_words: i64,
    words: Vec<u32>,
    written: Vec<u32>,
}

impl Memory {
    fn new(space: Space, rows: i64, row_words: i64) -> Self {
        let len = usize::try_from(rows * row_words).unwrap_or_default();
        Memory { space, row_words, words: vec![0; len], written: vec![0; len] }
    }

    /// The word of a bit address, if the memory has it.
    fn word(&self, address: i64) -> Option<usize> {
        let (row, column) = match self.space {
            Space::Shared | Space::Memory => (0, address >> 5),
            Space::Tmem | Space::Registers => (address >> 21, (address >> 5) & 0xffff),
        };
        if !(0..self.row_words).contains(&column) || row < 0 {
            return None;
        }
        usize::try_from(row * self.row_words + column).ok().filter(|at| *at < self.words.len())
    }

    /// Places that instructions name do not cross a word.
    fn write(&mut self, address: i64, bits: u32, value: u32) -> Option<()> {
        let (at, mask) = (self.word(address)?, mask(address, bits)?);
        self.words[at] = self.words[at] & !mask | value << (address & 31) & mask;
        self.written[at] |= mask;
        Some(())
    }

    fn read(&self, address: i64, bits: u32) -> Option<u32> {
        let (at, mask) = (self.word(address)?, mask(address, bits)?);
        (self.written[at] & mask == mask).then(|| (self.words[at] & mask) >> (address & 31))
    }
}

fn mask(address: i64, bits: u32) -> Option<u32> {
    let first = u32::try_from(address & 31).ok()?;
    (first + bits <= 32).then(|| u32::MAX >> (32 - bits) << first)
}

/// A reading of something that was never written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Poison {
    /// The element's row.
    pub row: usize,
    /// The element's column.
    pub col: usize,
    /// Where it was read; none where the side's map has no place.
    pub place: Option<Place>,
}

/// What a side reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// row + rows·column; NaN for poison.
    pub values: Vec<f32>,
    /// What was never written, by rows.
    pub poison: Vec<Poison>,
}

/// Tensor memory, shared memory and the registers of four warps, all poison at first.
#[derive(Clone, Debug)]
pub struct Machine {
    tmem: Memory,
    shared: Memory,
    registers: Memory,
}

impl Default for Machine {
    fn default() -> Self {
        Machine::new()
    }
}

impl Machine {
    /// Nothing written.
    #[must_use]
    pub fn new() -> Self {
        Machine {
            tmem: Memory::new(Space::Tmem, TMEM_LANES, TMEM_COLUMNS),
            shared: Memory::new(Space::Shared, 1, SHARED_BYTES / 4),
            registers: Memory::new(Space::Registers, THREADS, REGISTERS),
        }
    }

    fn memory(&mut self, space: Space) -> Result<&mut Memory> {
        match space {
            Space::Tmem => Ok(&mut self.tmem),
            Space::Shared => Ok(&mut self.shared),
            Space::Registers => Ok(&mut self.registers),
            Space::Memory => {
                Err(Error::OutOfMemory { what: "the emulator has no memory besides a block's own".to_owned() })
            }
        }
    }

    /// Writes `values` (row + rows·column), rounded to the side's dtype, to where the side has its elements.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] for an address outside the memory; [`Error::Word`] for a dtype without values here; what is
    /// wrong with the side.
    pub fn write(&mut self, side: &Side, values: &[f32]) -> Result<()> {
        let table = side.table()?;
        let memory = self.memory(table.space)?;
        for (element, (address, value)) in table.address.iter().zip(values).enumerate() {
            let code = encode(side.dtype, *value)?;
            memory.write(*address, table.bits, code).ok_or_else(|| Error::OutOfMemory {
                what: format!(
                    "element ({}, {}) is stored to {}, which the memory does not have",
                    element % table.rows,
                    element / table.rows,
                    table.place(*address)
                ),
            })?;
        }
        Ok(())
    }

    /// Reads every element of the side.
    ///
    /// # Errors
    /// [`Error::Word`] for a dtype without values here; what is wrong with the side.
    pub fn read(&mut self, side: &Side) -> Result<Reading> {
        let table = side.table()?;
        let memory = self.memory(table.space)?;
        let mut reading = Reading { values: vec![f32::NAN; table.address.len()], poison: Vec::new() };
        for row in 0..table.rows {
            for col in 0..table.cols {
                let address = table.at(row, col);
                match memory.read(address, table.bits) {
                    Some(code) => reading.values[row + table.rows * col] = decode(side.dtype, code)?,
                    None => {
                        let place = (address != i64::MIN).then(|| table.place(address));
                        reading.poison.push(Poison { row, col, place });
                    }
                }
            }
        }
        Ok(reading)
    }

    /// Carries the bits of each element. Poison stays behind: what was not written is not written there either.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where `to` lies outside its memory; [`Error::File`] for sides of different tiles or widths.
    pub fn copy(&mut self, from: &Side, to: &Side) -> Result<()> {
        let (source, target) = (from.table()?, to.table()?);
        if (source.rows, source.cols, source.bits) != (target.rows, target.cols, target.bits) {
            return Err(Error::File { what: format!("{} and {} are different tiles", from.about, to.about) });
        }
        for (from, to) in source.address.iter().zip(&target.address) {
            if let Some(code) = self.memory(source.space)?.read(*from, source.bits) {
                let what = || format!("{} lies outside the memory", target.place(*to));
                let written = self.memory(target.space)?.write(*to, target.bits, code);
                written.ok_or_else(|| Error::OutOfMemory { what: what() })?;
            }
        }
        Ok(())
    }

    /// D = A·B (+ D, with `accumulate`), in f32. The poison that was read comes back; its products are NaN.
    ///
    /// # Errors
    /// [`Error::File`] where the tiles do not fit; as [`Machine::read`] and [`Machine::write`].
    pub fn multiply(&mut self, a: &Side, b: &Side, d: &Side, accumulate: bool) -> Result<Vec<Poison>> {
        if (a.cols, a.rows, b.cols) != (b.rows, d.rows, d.cols) {
            let what = format!("{} × {} by {} × {} into {} × {}", a.rows, a.cols, b.rows, b.cols, d.rows, d.cols);
            return Err(Error::File { what });
        }
        let (left, right) = (self.read(a)?, self.read(b)?);
        let mut poison = [left.poison, right.poison].concat();
        let mut sums = vec![0.0; usize::try_from(d.rows * d.cols).unwrap_or_default()];
        if accumulate {
            let before = self.read(d)?;
            sums = before.values;
            poison.extend(before.poison);
        }
        let size = |n: i64| usize::try_from(n).unwrap_or_default();
        product(&left.values, &right.values, [size(a.rows), size(a.cols), size(b.cols)], &mut sums);
        self.write(d, &sums)?;
        Ok(poison)
    }
}

/// sums[i + m·j] += Σ_k a[i + m·k]·b[k + depth·j].
pub(super) fn product(a: &[f32], b: &[f32], [m, depth, n]: [usize; 3], sums: &mut [f32]) {
    for j in 0..n {
        let column = &mut sums[m * j..][..m];
        for k in 0..depth {
            let factor = b[k + depth * j];
            for (sum, a) in column.iter_mut().zip(&a[m * k..][..m]) {
                *sum += a * factor;
            }
        }
    }
}

fn no_values(dtype: Dtype) -> Error {
    Error::Word {
        what: "dtype of values",
        got: dtype.name().to_owned(),
        allowed: "f32, tf32, f16, bf16, s8, u8, s32".to_owned(),
    }
}

/// The bits of a value, rounded to nearest even.
fn encode(dtype: Dtype, value: f32) -> Result<u32> {
    match dtype {
        Dtype::F32 => Ok(value.to_bits()),
        // The 10 bits of fraction that the tensor core keeps, rounded to nearest even.
        Dtype::Tf32 => Ok((value.to_bits() + 0xfff + (value.to_bits() >> 13 & 1)) & !0x1fff),
        Dtype::F16 => Ok(f16::from_f32(value).to_bits().into()),
        Dtype::Bf16 => Ok(bf16::from_f32(value).to_bits().into()),
        Dtype::S8 => Ok((value.round_ties_even() as i8 as u8).into()),
        Dtype::U8 => Ok((value.round_ties_even() as u8).into()),
        Dtype::S32 => Ok(value.round_ties_even() as i32 as u32),
        Dtype::E4m3 | Dtype::E5m2 => Err(no_values(dtype)),
    }
}

/// The value of bits.
fn decode(dtype: Dtype, code: u32) -> Result<f32> {
    match dtype {
        Dtype::F32 | Dtype::Tf32 => Ok(f32::from_bits(code)),
        Dtype::F16 => Ok(f16::from_bits(code as u16).to_f32()),
        Dtype::Bf16 => Ok(bf16::from_bits(code as u16).to_f32()),
        Dtype::S8 => Ok((code as u8 as i8).into()),
        Dtype::U8 => Ok((code as u8).into()),
        Dtype::S32 => Ok(code as i32 as f32),
        Dtype::E4m3 | Dtype::E5m2 => Err(no_values(dtype)),
    }
}

/// `value` as the dtype holds it.
pub(super) fn rounded(dtype: Dtype, value: f32) -> Result<f32> {
    decode(dtype, encode(dtype, value)?)
}
