//! Archives whose directory lies, and archives cut off or altered.

use crate::builder::{Builder, Entry, outcome};

/// `expect` is what reading the archive says after `change`.
fn check(change: impl FnOnce(&mut Builder), expect: &str) {
    let mut builder = Builder::new();
    change(&mut builder);
    assert_eq!(outcome(builder.build()), expect);
}

#[test]
fn the_builder_writes_what_is_read() {
    check(|_| {}, "read");
    check(|archive| archive.zip64 = false, "read");
}

#[test]
fn every_truncation_is_refused() {
    let whole = Builder::new().build();
    for length in 0..whole.len() {
        let said = outcome(whole[..length].to_vec());
        assert!(said.starts_with("not a whole zip archive: "), "{length} bytes: {said}");
    }
    for extra in [1, 22, 4096] {
        let mut longer = whole.clone();
        longer.resize(whole.len() + extra, 0);
        assert_eq!(
            outcome(longer),
            "not a whole zip archive: its last 22 bytes are no end record: it is cut off, or something follows it"
        );
    }
    let shifted: Vec<u8> = [&b"#!/bin/sh\n"[..], &whole].concat();
    assert!(outcome(shifted).starts_with("not a whole zip archive: its zip64 end record"));
}

#[test]
fn every_altered_byte_is_noticed_or_harmless() {
    // What a reader uses of an archive: an altered byte is refused, or changes nothing that is read but the weights.
    let whole = Builder::new().build();
    let mut refused = 0;
    for at in 0..whole.len() {
        for bit in 0..8 {
            let mut altered = whole.clone();
            altered[at] ^= 1 << bit;
            refused += usize::from(outcome(altered) != "read");
        }
    }
    let share = refused * 100 / (whole.len() * 8);
    // The rest are data descriptors, times, and fields of local headers that the directory has too.
    assert!(share >= 85, "{share} % of the alterations are refused");
}

#[test]
fn compressed_and_encrypted_entries_are_refused() {
    // A zip bomb is a compressed entry; this one says that it unpacks to 4 GB.
    check(
        |archive| {
            let entry = archive.entry("model.json");
            (entry.method, entry.sizes) = (8, Some((1000, 0xffff_fffe)));
        },
        "entry \"m/models/model.json\" is compressed (method 8); archives of torch.export are stored, so that weights can be mapped",
    );
    check(|archive| archive.entry("model.json").flags |= 1, "entry \"m/models/model.json\" is encrypted");
    check(
        |archive| archive.entry("weight_0").sizes = Some((8, 9)),
        "entry \"m/data/weights/weight_0\": it is stored, but its two sizes differ",
    );
}

#[test]
fn entries_outside_the_file_or_over_each_other_are_refused() {
    let outside = "entry \"m/data/weights/weight_0\": it reaches into the directory or past the end of the archive";
    check(|archive| archive.entry("weight_0").sizes = Some((0x7fff_ffff, 0x7fff_ffff)), outside);
    check(|archive| archive.entry("weight_0").offset = Some(0x7fff_ffff), outside);
    check(|archive| archive.entry("weight_0").sizes = Some((8000, 8000)), outside);
    check(
        |archive| archive.entry("weight_0").sizes = Some((100, 100)),
        "entries \"m/data/weights/weight_0\" and \"m/data/weights/model_weights_config.json\" overlap",
    );
    check(
        |archive| archive.entry("byteorder").offset = Some(0),
        "entry \"m/byteorder\": its local header and the directory disagree",
    );
    check(
        |archive| archive.entry("byteorder").offset = Some(1),
        "entry \"m/byteorder\": its local header has no signature",
    );
    // Two entries, one place: a name each in the directory, one header.
    check(
        |archive| {
            let mut copy = archive.entry("weight_0").clone();
            copy.offset = Some(0);
            archive.entries.push(copy);
        },
        "two entries are named \"m/data/weights/weight_0\"",
    );
}

#[test]
fn sizes_of_64_bits_are_read_and_checked() {
    let wide = |numbers: &[u64]| {
        let mut extra = vec![1, 0, 8 * numbers.len() as u8, 0];
        numbers.iter().for_each(|number| extra.extend_from_slice(&number.to_le_bytes()));
        extra
    };
    let saturated = Some((u32::MAX, u32::MAX));
    check(
        |archive| {
            let entry = archive.entry("weight_0");
            (entry.sizes, entry.extra) = (saturated, wide(&[8, 8]));
        },
        "read",
    );
    let outside = "entry \"m/data/weights/weight_0\": it reaches into the directory or past the end of the archive";
    for huge in [u64::MAX, u64::MAX - 60, 1 << 63, 1 << 40] {
        check(
            |archive| {
                let entry = archive.entry("weight_0");
                (entry.sizes, entry.extra) = (saturated, wide(&[huge, huge]));
            },
            outside,
        );
    }
    for extra in [Vec::new(), wide(&[8]), vec![1, 0, 255, 255], vec![1, 0]] {
        check(
            |archive| {
                let entry = archive.entry("weight_0");
                (entry.sizes, entry.extra) = (saturated, extra);
            },
            "entry \"m/data/weights/weight_0\": its size or offset takes 64 bits, which its record does not have",
        );
    }
}

#[test]
fn counts_that_the_directory_does_not_have_are_refused() {
    check(|archive| archive.records = Some(3), "not a whole zip archive: its two end records disagree");
    let lie = |records, expect: &str| {
        let change = |archive: &mut Builder| (archive.zip64, archive.records) = (false, Some(records));
        check(change, expect);
    };
    lie(3, "not a whole zip archive: the directory has more bytes than its records");
    lie(8, "not a whole zip archive: a record of its directory is cut off");
    lie(0xfffe, "not a whole zip archive: a record of its directory is cut off");
}

#[test]
fn names_that_are_no_plain_paths_are_refused() {
    for name in ["m/../../etc/passwd", "/etc/passwd", "m//model", "m/.", "m\\model", "m/a\0b", "", "m/"] {
        check(
            |archive| archive.entries.push(Entry::new(name, b"")),
            &format!("entry {name:?} has no plain relative path for a name"),
        );
    }
    let long = "m/".to_owned() + &"a".repeat(2000);
    check(
        |archive| archive.entries.push(Entry::new(&long, b"")),
        "the length of an entry's name in bytes is 2002; at most 1024 is read",
    );
}

#[test]
fn entries_lie_in_one_folder() {
    check(
        |archive| archive.entries.push(Entry::new("other/byteorder", b"big")),
        "the archive's entries lie in \"m\" and \"other\"; an archive of torch.export has one folder",
    );
    check(
        |archive| archive.entry("byteorder").local_name = Some("m/byteorxer".to_owned()),
        "entry \"m/byteorder\": its local header and the directory disagree",
    );
}

#[test]
fn formats_that_are_not_known_are_refused() {
    let set = |name: &'static str, text: &'static str| {
        move |archive: &mut Builder| archive.entry(name).bytes = text.as_bytes().to_vec()
    };
    check(set("byteorder", "big"), "byteorder is \"big\"; only little is read");
    check(set("archive_format", "pt3"), "archive_format is \"pt3\", not pt2");
    check(set("archive_version", "1"), "archive_version is \"1\"; only 0 is known");
    for name in ["byteorder", "archive_format", "archive_version"] {
        let entry = format!("m/{name}");
        check(
            |archive| archive.entries.retain(|kept| kept.name != entry),
            &format!("the archive has no entry \"{name}\""),
        );
    }
    check(
        |archive| archive.entries.retain(|kept| !kept.name.ends_with("weight_0")),
        "the archive has no entry \"data/weights/weight_0\"",
    );
    check(
        |archive| archive.entries.retain(|kept| !kept.name.ends_with("model.json")),
        "the archive holds no exported program (no entry models/….json)",
    );
    check(
        |archive| {
            archive.entries.retain(|kept| !kept.name.ends_with("model.json"));
            archive.entries.push(Entry::new("m/data/aotinductor/model/a.wrapper.so", b"\x7fELF"));
        },
        "the archive holds code that AOTInductor compiled, which only libtorch runs; save the exported program \
         itself: torch.export.save(program, 'model.pt2')",
    );
    check(
        |archive| {
            archive.entries.retain(|kept| !kept.name.ends_with("weights_config.json"));
            archive.entries.push(Entry::new("m/data/weights/model.pt", b"\x80\x02}q\x00."));
        },
        "the archive is of torch 2.8: its weights are pickled, which is code to run. Save it anew: python -c \"import \
         torch; torch.export.save(torch.export.load('old.pt2'), 'new.pt2')\"  # with torch 2.9 or later",
    );
}

#[test]
fn damaged_json_is_refused_at_once_and_damaged_weights_when_asked() {
    check(
        |archive| archive.entry("model.json").crc32 = Some(0),
        &format!(
            "entry \"models/model.json\" is damaged: its CRC-32 is {:08x}, the archive says 00000000",
            crc32_of_program()
        ),
    );
    let mut builder = Builder::new();
    builder.entry("weight_0").crc32 = Some(7);
    let archive = rapt_pt2::Archive::from_bytes(builder.build().into()).expect("weights are not read");
    let said = archive.check_storages().expect_err("damaged").to_string();
    assert!(said.starts_with("entry \"data/weights/weight_0\" is damaged: "), "{said}");
}

/// The checksum that the builder writes for the program.
fn crc32_of_program() -> u32 {
    let mut builder = Builder::new();
    builder.zip64 = false;
    let bytes = builder.build();
    let name = b"m/models/model.json";
    // The last time the name occurs is in the directory; the checksum stands 30 bytes before it.
    let at = bytes.windows(name.len()).rposition(|window| window == name).expect("the name");
    u32::from_le_bytes(bytes[at - 30..at - 26].try_into().expect("four bytes"))
}
