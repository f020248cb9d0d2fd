//! Little-endian numbers and texts at a place, where the file has them.

pub(super) fn bytes_at<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..at.checked_add(N)?)?.try_into().ok()
}

pub(super) fn u16_at(data: &[u8], at: usize) -> Option<usize> {
    bytes_at(data, at).map(|bytes| u16::from_le_bytes(bytes).into())
}

pub(super) fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    bytes_at(data, at).map(u32::from_le_bytes)
}

pub(super) fn u64_at(data: &[u8], at: usize) -> Option<usize> {
    bytes_at(data, at).and_then(|bytes| u64::from_le_bytes(bytes).try_into().ok())
}

pub(super) fn text_at(names: &[u8], at: usize) -> Option<String> {
    let name = names.get(at..)?.split(|byte| *byte == 0).next()?;
    String::from_utf8(name.to_vec()).ok()
}
