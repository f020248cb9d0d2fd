//! A `DLTensor` as a producer fills it, with wrong numbers and null pointers: what is not sound is refused before it is followed.

use std::ffi::c_void;

use arbitrary::{Result as Parsed, Unstructured};
use rapt::{DType, Error, Extent, Options, Spec, View};

use crate::arbitrary::once_in;
use crate::check_refusal;
use crate::dlpack_abi::{DlDataType, DlDevice, DlTensor, describe, device_of, dtype_to};

/// Whether the bytes describe a tensor that is read.
///
/// # Panics
/// If a description is accepted that is not the producer's, or memory is followed that is not there.
#[must_use]
pub fn dlpack(data: &[u8]) -> bool {
    let mut u = Unstructured::new(data);
    let Ok(producer) = parse(&mut u) else { return false };
    match read(producer) {
        Ok(()) => true,
        Err(error) => {
            check_refusal(&error);
            false
        }
    }
}

/// What a producer holds; its arrays are as long as it says, but for a rank that is refused before they are read.
struct Producer {
    data: usize,
    device: (i32, i32),
    ndim: i32,
    dtype: (u8, u8, u16),
    shape: Option<Vec<i64>>,
    strides: Option<Vec<i64>>,
    byte_offset: u64,
}

const ADDRESS: usize = 1 << 40;

fn parse(u: &mut Unstructured<'_>) -> Parsed<Producer> {
    let rank = u.int_in_range(0..=9usize)?;
    let mut sizes = Vec::new();
    for _ in 0..rank {
        sizes.push(match u.int_in_range(0..=7u8)? {
            0..=5 => i64::from(u.arbitrary::<u8>()? % 9),
            6 => i64::from(u.arbitrary::<u32>()?),
            _ => u.arbitrary()?,
        });
    }
    let strides = if once_in(u, 2)? {
        let mut steps = Vec::new();
        for _ in 0..rank {
            let step = if once_in(u, 8)? { u.arbitrary()? } else { i64::from(u.arbitrary::<i16>()?) };
            steps.push(step);
        }
        Some(steps)
    } else {
        None
    };
    let dtype = match u.int_in_range(0..=3u8)? {
        0..=2 => {
            let usual = [(2, 32, 1), (2, 16, 1), (4, 16, 1), (2, 64, 1), (6, 8, 1), (0, 8, 1), (1, 16, 1), (17, 4, 2)];
            *u.choose(&usual)?
        }
        _ => (u.arbitrary()?, u.arbitrary()?, u.arbitrary()?),
    };
    Ok(Producer {
        data: if once_in(u, 8)? { u.arbitrary()? } else { ADDRESS },
        device: if once_in(u, 8)? { u.arbitrary()? } else { (1, 0) },
        ndim: if once_in(u, 8)? { u.arbitrary()? } else { rank as i32 },
        dtype,
        shape: if once_in(u, 16)? { None } else { Some(sizes) },
        strides,
        byte_offset: if once_in(u, 4)? { u.arbitrary()? } else { 8 * u64::from(u.arbitrary::<u8>()?) },
    })
}

fn read(producer: Producer) -> rapt::Result<()> {
    let Producer { data, device, mut ndim, dtype, mut shape, mut strides, byte_offset } = producer;
    let held = shape.as_ref().map_or(0, Vec::len);
    // A producer whose arrays are shorter than ndim cannot be seen through; one that says less than it holds can be read.
    if usize::try_from(ndim).is_ok_and(|rank| rank > held && rank <= rapt::MAX_RANK) && shape.is_some() {
        ndim = held as i32;
    }
    let array = |held: &mut Option<Vec<i64>>| held.as_mut().map_or(std::ptr::null_mut(), Vec::as_mut_ptr);
    let tensor = DlTensor {
        data: std::ptr::without_provenance_mut::<c_void>(data),
        device: DlDevice { device_type: device.0, device_id: device.1 },
        ndim,
        dtype: DlDataType { code: dtype.0, bits: dtype.1, lanes: dtype.2 },
        shape: array(&mut shape),
        strides: array(&mut strides),
        byte_offset,
    };
    // SAFETY: each array is null or has at least ndim entries, or ndim is beyond what is read.
    let seen = unsafe { describe("q", &tensor) }?;
    let rank = usize::try_from(ndim).expect("a negative rank is refused");
    assert!(rank <= rapt::MAX_RANK && (rank == 0 || shape.is_some()));
    let sizes = shape.unwrap_or_default();
    assert!(seen.shape.iter().zip(&sizes).all(|(&got, &said)| got as i128 == i128::from(said)));
    assert_eq!(seen.shape.len(), rank);
    assert_eq!(seen.dtype.bits(), usize::from(dtype.1), "no dtype is read as another");
    let back = dtype_to(seen.dtype);
    if seen.dtype.is_computed() || seen.dtype == DType::Bool {
        assert_eq!((back.code, back.bits, back.lanes), dtype, "a dtype that is computed goes back as it came");
    }
    assert_eq!(seen.device, device_of(device.0, device.1));
    match &strides {
        Some(steps) => assert!(seen.strides.iter().zip(steps).all(|(&got, &said)| got as i64 == said)),
        None => assert_eq!(seen.shape.contiguous(), Some(seen.strides), "no strides are row-major ones"),
    }
    let address = if data == 0 { Some(0) } else { data.checked_add(byte_offset as usize) };
    assert_eq!(Some(seen.ptr.addr()), address, "no address wraps, and null stays null");
    // SAFETY: nothing is read through it.
    let view = unsafe {
        View::from_raw_parts("q", seen.ptr, seen.dtype, seen.shape, seen.strides, seen.device, Extent::Declared)
    }?;
    match Spec::builder(&view, &view, &view, &Options::default()).build() {
        Ok(spec) => assert_eq!(spec.numerics.storage, seen.dtype),
        Err(error @ (Error::Rank { .. } | Error::UnsupportedDtype { .. } | Error::ZeroHeadDim { .. })) => {
            check_refusal(&error);
        }
        Err(error) => check_refusal(&error),
    }
    Ok(())
}
