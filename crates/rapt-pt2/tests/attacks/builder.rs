//! Archives byte by byte: a small program that is read, and a zip writer that can be made to lie.

use std::sync::Arc;

use rapt_pt2::Archive;

/// A program `y = x + w` with a symbolic batch and a guard.
pub(crate) const PROGRAM: &str = include_str!("program.json");

/// The table of its weight.
pub(crate) const WEIGHTS: &str = r#"{"config": {"weight": {"path_name": "weight_0", "is_param": true, "use_pickle": false, "tensor_meta": {"dtype": 7, "sizes": [{"as_int": 2}], "requires_grad": true, "device": {"type": "cpu", "index": null}, "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}}}}"#;

/// The table of its constants, of which it has none.
pub(crate) const CONSTANTS: &str = r#"{"config": {}}"#;

/// An entry: what its headers say, and its bytes.
#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) local_name: Option<String>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) method: u16,
    pub(crate) flags: u16,
    pub(crate) crc32: Option<u32>,
    /// The sizes that the directory gives, if not the bytes'.
    pub(crate) sizes: Option<(u32, u32)>,
    /// Where the directory says the local header is, if not where it is.
    pub(crate) offset: Option<u32>,
    pub(crate) extra: Vec<u8>,
}

/// An archive to be written.
#[derive(Clone)]
pub(crate) struct Builder {
    pub(crate) entries: Vec<Entry>,
    /// Whether zip64 records stand before the end record.
    pub(crate) zip64: bool,
    /// The number of records that the end record gives, if not the true one.
    pub(crate) records: Option<u16>,
}

fn little(bytes: &mut Vec<u8>, numbers: &[(u64, usize)]) {
    for (number, count) in numbers {
        bytes.extend_from_slice(&number.to_le_bytes()[..*count]);
    }
}

impl Entry {
    pub(crate) fn new(name: &str, bytes: &[u8]) -> Entry {
        Entry {
            name: name.to_owned(),
            local_name: None,
            bytes: bytes.to_vec(),
            method: 0,
            flags: 0x0808,
            crc32: None,
            sizes: None,
            offset: None,
            extra: Vec::new(),
        }
    }
}

impl Builder {
    /// The archive of [`PROGRAM`].
    pub(crate) fn new() -> Builder {
        Builder::of(PROGRAM, WEIGHTS)
    }

    /// The archive of a program and a table of weights; `weight_0` holds two floats.
    pub(crate) fn of(program: &str, weights: &str) -> Builder {
        let weight: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|number| number.to_le_bytes()).collect();
        let entries = [
            ("m/data/weights/weight_0", &weight[..]),
            ("m/data/weights/model_weights_config.json", weights.as_bytes()),
            ("m/data/constants/model_constants_config.json", CONSTANTS.as_bytes()),
            ("m/models/model.json", program.as_bytes()),
            ("m/archive_format", b"pt2"),
            ("m/archive_version", b"0"),
            ("m/byteorder", b"little"),
        ];
        let entries = entries.iter().map(|(name, bytes)| Entry::new(name, bytes)).collect();
        Builder { entries, zip64: true, records: None }
    }

    /// The entry whose name ends so.
    pub(crate) fn entry(&mut self, name: &str) -> &mut Entry {
        self.entries.iter_mut().find(|entry| entry.name.ends_with(name)).expect("an entry of this name")
    }

    /// The bytes, with the place of each entry's local header.
    pub(crate) fn places(&self) -> (Vec<u8>, Vec<usize>) {
        let (mut bytes, mut places) = (Vec::new(), Vec::new());
        for entry in &self.entries {
            places.push(bytes.len());
            let name = entry.local_name.as_ref().unwrap_or(&entry.name);
            // Sizes and checksum are left to the data descriptor, as torch leaves them.
            little(&mut bytes, &[(0x0403_4b50, 4), (45, 2), (entry.flags.into(), 2), (entry.method.into(), 2), (0, 4)]);
            little(&mut bytes, &[(0, 4), (0, 4), (0, 4), (name.len() as u64, 2), (0, 2)]);
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(&entry.bytes);
            little(&mut bytes, &[(0x0807_4b50, 4), (crc32(&entry.bytes).into(), 4)]);
            little(&mut bytes, &[(entry.bytes.len() as u64, 8), (entry.bytes.len() as u64, 8)]);
        }
        (bytes, places)
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let (mut bytes, places) = self.places();
        let directory = bytes.len() as u64;
        for (entry, place) in self.entries.iter().zip(places) {
            let true_size = entry.bytes.len() as u32;
            let (stored, full) = entry.sizes.unwrap_or((true_size, true_size));
            let crc = entry.crc32.unwrap_or_else(|| crc32(&entry.bytes));
            let offset = entry.offset.unwrap_or(place as u32);
            little(&mut bytes, &[(0x0201_4b50, 4), (0, 2), (45, 2), (entry.flags.into(), 2), (entry.method.into(), 2)]);
            little(&mut bytes, &[(0, 4), (crc.into(), 4), (stored.into(), 4), (full.into(), 4)]);
            little(&mut bytes, &[(entry.name.len() as u64, 2), (entry.extra.len() as u64, 2), (0, 2), (0, 2), (0, 2)]);
            little(&mut bytes, &[(0, 4), (offset.into(), 4)]);
            bytes.extend_from_slice(entry.name.as_bytes());
            bytes.extend_from_slice(&entry.extra);
        }
        let end = bytes.len() as u64;
        let records = self.entries.len() as u64;
        if self.zip64 {
            little(
                &mut bytes,
                &[(0x0606_4b50, 4), (44, 8), (45, 2), (45, 2), (0, 4), (0, 4), (records, 8), (records, 8)],
            );
            little(&mut bytes, &[(end - directory, 8), (directory, 8)]);
            little(&mut bytes, &[(0x0706_4b50, 4), (0, 4), (end, 8), (1, 4)]);
        }
        let records = self.records.map_or(records, u64::from);
        little(&mut bytes, &[(0x0605_4b50, 4), (0, 4), (records, 2), (records, 2)]);
        little(&mut bytes, &[(end - directory, 4), (directory, 4), (0, 2)]);
        bytes
    }
}

/// CRC-32 as zip has it, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    })
}

/// What reading `bytes` says: "read", or the error.
pub(crate) fn outcome(bytes: Vec<u8>) -> String {
    Archive::from_bytes(Arc::from(bytes)).map_or_else(|error| error.to_string(), |_| "read".to_owned())
}
