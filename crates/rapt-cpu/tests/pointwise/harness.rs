//! Programs run over tensors of bytes.

use std::sync::Arc;

use rapt_core::{Arch, DType};
use rapt_cpu::pointwise::{Instruction, Loop, Program, Register, Unary, ZeroDivision};

/// The instruction sets of this machine whose loops differ.
pub(crate) fn archs() -> Vec<Arch> {
    rapt_cpu::available()
        .iter()
        .copied()
        .filter(|arch| !matches!(arch, Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx))
        .collect()
}

/// A tensor's memory, and where its elements lie there.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: DType,
    pub(crate) bytes: Vec<u8>,
    /// The element with all indices 0.
    pub(crate) offset: usize,
    pub(crate) strides: Vec<isize>,
}

impl Tensor {
    /// Elements one after another.
    pub(crate) fn dense<T: Copy>(dtype: DType, elements: &[T]) -> Tensor {
        assert_eq!(size_of::<T>() * 8, dtype.bits());
        let mut bytes = vec![0u8; size_of_val(elements)];
        // SAFETY: plain numbers, as many bytes as they have.
        unsafe { std::ptr::copy_nonoverlapping(elements.as_ptr().cast(), bytes.as_mut_ptr(), bytes.len()) };
        Tensor { dtype, bytes, offset: 0, strides: vec![1] }
    }

    /// The elements of memory, one after another.
    pub(crate) fn elements<T: Copy>(&self) -> Vec<T> {
        let size = size_of::<T>();
        assert_eq!(size * 8, self.dtype.bits());
        // SAFETY: plain numbers of any bits.
        self.bytes.chunks_exact(size).map(|bytes| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }).collect()
    }
}

/// Memory aligned to 64 bytes.
pub(crate) fn scratch(bytes: usize) -> Vec<[u64; 8]> {
    vec![[0xDEAD_BEEF_DEAD_BEEF; 8]; bytes.div_ceil(64)]
}

/// Runs a program over `shape` in as many items as three threads get.
pub(crate) fn run(
    arch: Arch,
    code: &[Instruction],
    shape: &[usize],
    tensors: &mut [Tensor],
) -> Result<(), ZeroDivision> {
    let program = Arc::new(Program::new(tensors.iter().map(|t| t.dtype).collect(), code.to_vec()).unwrap());
    let strides: Vec<Vec<isize>> = tensors.iter().map(|t| t.strides.clone()).collect();
    let each = Loop::new(arch, program, shape, &strides).unwrap();
    let mut scratch = scratch(each.scratch_bytes());
    // Vectors of bytes are aligned enough: the allocator aligns to 16.
    let pointer = |t: &mut Tensor| t.bytes.as_mut_ptr().wrapping_add(t.offset * t.dtype.bits() / 8);
    let pointers: Vec<*mut u8> = tensors.iter_mut().map(pointer).collect();
    let items = each.items(3);
    for item in (0..items).rev() {
        // SAFETY: the tensors have what strides reach.
        unsafe { each.run_item(item, items, &pointers, scratch.as_mut_ptr().cast())? };
    }
    Ok(())
}

/// A function of float32, element by element.
pub(crate) fn unary(arch: Arch, op: Unary, x: &[f32]) -> Vec<f32> {
    let code = [Instruction::Load(0), Instruction::Unary(op, Register(0)), Instruction::Store(1, Register(1))];
    let mut tensors = [Tensor::dense(DType::F32, x), Tensor::dense(DType::F32, &vec![0f32; x.len()])];
    run(arch, &code, &[x.len()], &mut tensors).unwrap();
    tensors[1].elements()
}
