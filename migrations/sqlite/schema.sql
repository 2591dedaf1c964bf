-- A new file of the newest revision. Written by scripts/document from the migrations: change those.
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE rollouts (
        rollout_id TEXT NOT NULL,
        incarnation TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('open', 'frozen', 'retired')),
        version INTEGER NOT NULL,
        snapshot_id TEXT,
        opened_at REAL NOT NULL,
        frozen_at REAL,
        retired_at REAL,
        PRIMARY KEY (rollout_id)
    ) STRICT
    ;
CREATE INDEX rollouts_by_retirement ON rollouts (retired_at) WHERE state = 'retired';
CREATE INDEX rollouts_by_state ON rollouts (state, rollout_id);
CREATE TABLE writers (
        writer_id TEXT NOT NULL,
        pid INTEGER NOT NULL,
        host TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        started_at REAL NOT NULL,
        last_seen_at REAL NOT NULL,
        PRIMARY KEY (writer_id)
    ) STRICT
    ;
CREATE TABLE entries (
        rollout_id TEXT NOT NULL,
        model_call_id TEXT NOT NULL,
        payload_digest BLOB NOT NULL,
        sequence_digest BLOB NOT NULL,
        prefix_call_id TEXT,
        prefix_length INTEGER NOT NULL,
        prompt_length INTEGER NOT NULL,
        generation_length INTEGER NOT NULL,
        sequence_length INTEGER NOT NULL,
        schema_version INTEGER NOT NULL,
        model TEXT NOT NULL,
        finish_reason TEXT,
        created_at REAL NOT NULL,
        stored_at REAL NOT NULL,
        writer_id TEXT NOT NULL,
        content TEXT NOT NULL,
        extras TEXT NOT NULL,
        prompt_suffix BLOB NOT NULL,
        generation BLOB NOT NULL,
        log_probs BLOB NOT NULL,
        routed_experts BLOB, agent TEXT, parent_agent TEXT, purpose TEXT CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')), offers_tools INTEGER CHECK (offers_tools IN (0, 1)), upstream TEXT, begun_at REAL,
        PRIMARY KEY (rollout_id, model_call_id),
        CHECK (length(prompt_suffix) = 4 * (prompt_length - prefix_length)),
        CHECK (length(generation) = 4 * generation_length),
        CHECK (length(log_probs) = 8 * generation_length),
        CHECK (sequence_length = prompt_length + generation_length),
        CHECK ((prefix_call_id IS NULL) = (prefix_length = 0)),
        FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id)
    ) STRICT
    ;
CREATE TABLE call_intents (
        rollout_id TEXT NOT NULL,
        model_call_id TEXT NOT NULL,
        writer_id TEXT NOT NULL,
        begun_at REAL NOT NULL,
        outcome TEXT CHECK (outcome IN ('refused')),
        detail TEXT NOT NULL, agent TEXT, parent_agent TEXT, purpose TEXT CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')), offers_tools INTEGER CHECK (offers_tools IN (0, 1)), session_headers TEXT,
        PRIMARY KEY (rollout_id, model_call_id),
        FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id),
        FOREIGN KEY(writer_id) REFERENCES writers (writer_id)
    ) STRICT
    ;
CREATE TABLE incomplete_flags (
        flag_id INTEGER NOT NULL,
        rollout_id TEXT NOT NULL,
        model_call_id TEXT NOT NULL,
        reason TEXT NOT NULL,
        detail TEXT NOT NULL,
        flagged_at REAL NOT NULL, agent TEXT, parent_agent TEXT, purpose TEXT CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')), offers_tools INTEGER CHECK (offers_tools IN (0, 1)), session_headers TEXT,
        PRIMARY KEY (flag_id),
        FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id)
    ) STRICT
    ;
CREATE INDEX incomplete_flags_by_rollout ON incomplete_flags (rollout_id);
CREATE TABLE late_writes (
        rollout_id TEXT NOT NULL,
        model_call_id TEXT NOT NULL,
        state TEXT NOT NULL,
        payload_digest BLOB NOT NULL,
        writer_id TEXT NOT NULL,
        attempted_at REAL NOT NULL,
        PRIMARY KEY (rollout_id, model_call_id)
    ) STRICT
    ;
CREATE TABLE snapshots (
        snapshot_id TEXT NOT NULL,
        version INTEGER NOT NULL,
        rollout_id TEXT NOT NULL,
        incomplete INTEGER NOT NULL CHECK (incomplete IN (0, 1)),
        entry_count INTEGER NOT NULL,
        frozen_at REAL NOT NULL,
        PRIMARY KEY (snapshot_id, version),
        FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id)
    ) STRICT
    ;
CREATE INDEX snapshots_by_rollout ON snapshots (rollout_id);
CREATE TABLE snapshot_entries (
        snapshot_id TEXT NOT NULL,
        version INTEGER NOT NULL,
        model_call_id TEXT NOT NULL,
        payload_digest BLOB NOT NULL,
        sequence_digest BLOB NOT NULL,
        prefix_call_id TEXT,
        prefix_length INTEGER NOT NULL,
        prompt_length INTEGER NOT NULL,
        generation_length INTEGER NOT NULL,
        sequence_length INTEGER NOT NULL,
        schema_version INTEGER NOT NULL,
        model TEXT NOT NULL,
        finish_reason TEXT,
        created_at REAL NOT NULL,
        stored_at REAL NOT NULL,
        writer_id TEXT NOT NULL,
        content TEXT NOT NULL,
        extras TEXT NOT NULL,
        prompt_suffix BLOB NOT NULL,
        generation BLOB NOT NULL,
        log_probs BLOB NOT NULL,
        routed_experts BLOB, agent TEXT, parent_agent TEXT, purpose TEXT CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')), offers_tools INTEGER CHECK (offers_tools IN (0, 1)), upstream TEXT, begun_at REAL,
        PRIMARY KEY (snapshot_id, version, model_call_id),
        CHECK (length(prompt_suffix) = 4 * (prompt_length - prefix_length)),
        CHECK (length(generation) = 4 * generation_length),
        CHECK (length(log_probs) = 8 * generation_length),
        CHECK (sequence_length = prompt_length + generation_length),
        CHECK ((prefix_call_id IS NULL) = (prefix_length = 0)),
        FOREIGN KEY(snapshot_id, version) REFERENCES snapshots (snapshot_id, version) DEFERRABLE INITIALLY DEFERRED
    ) STRICT
    ;
CREATE TABLE snapshot_flags (
        snapshot_flag_id INTEGER NOT NULL,
        snapshot_id TEXT NOT NULL,
        version INTEGER NOT NULL,
        model_call_id TEXT NOT NULL,
        reason TEXT NOT NULL,
        detail TEXT NOT NULL,
        flagged_at REAL NOT NULL, agent TEXT, parent_agent TEXT, purpose TEXT CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')), offers_tools INTEGER CHECK (offers_tools IN (0, 1)), session_headers TEXT,
        PRIMARY KEY (snapshot_flag_id),
        FOREIGN KEY(snapshot_id, version) REFERENCES snapshots (snapshot_id, version) DEFERRABLE INITIALLY DEFERRED
    ) STRICT
    ;
CREATE INDEX snapshot_flags_by_snapshot ON snapshot_flags (snapshot_id, version);
CREATE TABLE build_outcomes (
        outcome_id INTEGER NOT NULL,
        snapshot_id TEXT NOT NULL,
        version INTEGER NOT NULL,
        rollout_id TEXT NOT NULL,
        outcome TEXT NOT NULL CHECK (outcome IN ('delivered', 'masked', 'failed', 'released')),
        reason TEXT NOT NULL,
        metrics TEXT NOT NULL,
        recorded_at REAL NOT NULL,
        PRIMARY KEY (outcome_id)
    ) STRICT
    ;
CREATE INDEX build_outcomes_by_rollout ON build_outcomes (rollout_id, version);
CREATE INDEX build_outcomes_by_snapshot ON build_outcomes (snapshot_id, version);
CREATE INDEX build_outcomes_masked ON build_outcomes (rollout_id, snapshot_id)
    WHERE outcome IN ('masked', 'failed')
    ;
CREATE TABLE numbers (
        n INTEGER NOT NULL,
        PRIMARY KEY (n)
    ) STRICT
    ;
CREATE TRIGGER snapshots_immutable BEFORE UPDATE ON snapshots
BEGIN
    SELECT RAISE(ABORT, 'a snapshot is immutable; freeze the rollout again for a new version');
END;
CREATE TRIGGER snapshots_evidence BEFORE DELETE ON snapshots
WHEN (
    SELECT outcome FROM build_outcomes WHERE snapshot_id = OLD.snapshot_id
    ORDER BY version DESC, outcome_id DESC LIMIT 1
) IN ('masked', 'failed')
BEGIN
    SELECT RAISE(ABORT, 'a masked or failed snapshot is evidence; record the outcome released to delete it');
END;
CREATE TRIGGER snapshots_sealed BEFORE INSERT ON snapshots
WHEN EXISTS (SELECT 1 FROM snapshots WHERE snapshot_id = NEW.snapshot_id AND version = NEW.version)
  OR EXISTS (SELECT 1 FROM snapshots WHERE rowid = NEW.rowid)
BEGIN
    SELECT RAISE(ABORT, 'a snapshot is immutable; freeze the rollout again for a new version');
END;
CREATE TRIGGER snapshot_entries_immutable BEFORE UPDATE ON snapshot_entries
BEGIN
    SELECT RAISE(ABORT, 'a snapshot is immutable; freeze the rollout again for a new version');
END;
CREATE TRIGGER snapshot_entries_evidence BEFORE DELETE ON snapshot_entries
WHEN (
    SELECT outcome FROM build_outcomes WHERE snapshot_id = OLD.snapshot_id
    ORDER BY version DESC, outcome_id DESC LIMIT 1
) IN ('masked', 'failed')
BEGIN
    SELECT RAISE(ABORT, 'a masked or failed snapshot is evidence; record the outcome released to delete it');
END;
CREATE TRIGGER snapshot_entries_sealed BEFORE INSERT ON snapshot_entries
WHEN EXISTS (SELECT 1 FROM snapshots WHERE snapshot_id = NEW.snapshot_id AND version = NEW.version)
  OR EXISTS (SELECT 1 FROM snapshot_entries WHERE rowid = NEW.rowid)
BEGIN
    SELECT RAISE(ABORT, 'a snapshot is immutable; freeze the rollout again for a new version');
END;
CREATE TRIGGER snapshot_flags_immutable BEFORE UPDATE ON snapshot_flags
BEGIN
    SELECT RAISE(ABORT, 'a snapshot is immutable; freeze the rollout again for a new version');
END;
CREATE TRIGGER snapshot_flags_evidence BEFORE DELETE ON snapshot_flags
WHEN (
    SELECT outcome FROM build_outcomes WHERE snapshot_id = OLD.snapshot_id
    ORDER BY version DESC, outcome_id DESC LIMIT 1
) IN ('masked', 'failed')
BEGIN
    SELECT RAISE(ABORT, 'a masked or failed snapshot is evidence; record the outcome released to delete it');
END;
CREATE TRIGGER snapshot_flags_sealed BEFORE INSERT ON snapshot_flags
WHEN EXISTS (SELECT 1 FROM snapshots WHERE snapshot_id = NEW.snapshot_id AND version = NEW.version)
  OR EXISTS (SELECT 1 FROM snapshot_flags WHERE rowid = NEW.rowid)
BEGIN
    SELECT RAISE(ABORT, 'a snapshot is immutable; freeze the rollout again for a new version');
END;
CREATE TRIGGER build_outcomes_append_only BEFORE UPDATE ON build_outcomes
    BEGIN
        SELECT RAISE(ABORT, 'outcomes are append-only; record a new one');
    END;
CREATE TRIGGER build_outcomes_not_replaced BEFORE INSERT ON build_outcomes
    WHEN EXISTS (SELECT 1 FROM build_outcomes WHERE outcome_id = NEW.outcome_id)
    BEGIN
        SELECT RAISE(ABORT, 'outcomes are append-only; record a new one');
    END;
CREATE TRIGGER build_outcomes_kept BEFORE DELETE ON build_outcomes
    WHEN EXISTS (SELECT 1 FROM snapshots WHERE snapshot_id = OLD.snapshot_id)
    BEGIN
        SELECT RAISE(ABORT, 'an outcome is kept for as long as its snapshot');
    END;
CREATE VIEW call_tokens AS
    SELECT rollout_id, model_call_id, iif(at < suffix, 'prompt', 'generation') AS part,
           prefix_length + at AS position,
           (SELECT ((instr(x'000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff', substr(four, 1, 1)) - 1) << 0) + ((instr(x'000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff', substr(four, 2, 1)) - 1) << 8) + ((instr(x'000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff', substr(four, 3, 1)) - 1) << 16) + ((instr(x'000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff', substr(four, 4, 1)) - 1) << 24) FROM (
                SELECT iif(at < suffix,
                           substr(prompt_suffix, 4 * at + 1, 4),
                           substr(generation, 4 * (at - suffix) + 1, 4)) AS four LIMIT 1)) AS token_id
    FROM (
        SELECT e.rollout_id, e.model_call_id, e.prefix_length, e.prompt_suffix, e.generation,
               e.prompt_length - e.prefix_length AS suffix,
               a.n * 1024 + b.n AS at
        FROM entries AS e
        CROSS JOIN numbers AS a ON a.n <= (e.sequence_length - e.prefix_length - 1) / 1024
        CROSS JOIN numbers AS b ON a.n * 1024 + b.n < e.sequence_length - e.prefix_length
    );
CREATE VIEW kept_evidence AS
    SELECT s.rollout_id, s.snapshot_id, s.version, s.entry_count AS calls, s.incomplete,
           o.outcome, o.reason, o.version AS judged_version,
           (SELECT group_concat(j.value, '; ') FROM json_each(o.metrics, '$.reasons') AS j) AS all_reasons,
           (SELECT group_concat(
                       f.reason
                       || iif(f.model_call_id = '', '', ' (call ' || f.model_call_id || ')')
                       || iif(f.detail = '', '', ': ' || f.detail), '; ')
              FROM snapshot_flags AS f
             WHERE f.snapshot_id = s.snapshot_id AND f.version = s.version) AS flags,
           datetime(CAST(round(s.frozen_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(s.frozen_at * 1000000) AS INTEGER) % 1000000) AS frozen,
           datetime(CAST(round(o.recorded_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(o.recorded_at * 1000000) AS INTEGER) % 1000000) AS judged
    FROM build_outcomes AS o
    JOIN snapshots AS s ON s.snapshot_id = o.snapshot_id
    WHERE o.outcome IN ('masked', 'failed')
      AND NOT EXISTS (SELECT 1 FROM build_outcomes AS later
                       WHERE later.snapshot_id = o.snapshot_id
                         AND (later.version, later.outcome_id) > (o.version, o.outcome_id));
CREATE VIEW late_calls AS
    SELECT l.rollout_id, l.model_call_id, l.state AS refused_as, r.state AS rollout_state,
           datetime(CAST(round(l.attempted_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(l.attempted_at * 1000000) AS INTEGER) % 1000000) AS attempted,
           CAST(l.attempted_at - r.frozen_at AS INTEGER) AS seconds_after_freeze,
           w.pid, w.host, w.writer_id, w.boot_id,
           datetime(CAST(round(w.started_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(w.started_at * 1000000) AS INTEGER) % 1000000) AS process_started,
           datetime(CAST(round(w.last_seen_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(w.last_seen_at * 1000000) AS INTEGER) % 1000000) AS process_last_seen
    FROM late_writes AS l
    LEFT JOIN rollouts AS r ON r.rollout_id = l.rollout_id
    LEFT JOIN writers AS w ON w.writer_id = l.writer_id;
CREATE TABLE capture_file (
            file_id TEXT NOT NULL,
            made_at REAL NOT NULL,
            copied_from TEXT,
            PRIMARY KEY (file_id)
        ) STRICT
        ;
CREATE TABLE call_histories (
            rollout_id TEXT NOT NULL,
            chain BLOB NOT NULL,
            model_call_id TEXT NOT NULL,
            reasoning BLOB NOT NULL,
            call_ids BLOB NOT NULL,
            ended INTEGER NOT NULL CHECK (ended IN (0, 1)),
            PRIMARY KEY (rollout_id, chain, model_call_id),
            FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id)
        ) WITHOUT ROWID, STRICT
        ;
CREATE INDEX entries_by_length ON entries (rollout_id, sequence_length, generation_length, model, agent);
CREATE VIEW rollout_overview AS
    SELECT r.rollout_id, r.state, r.version, r.snapshot_id,
           iif(r.state = 'retired', (
               SELECT j.value FROM build_outcomes AS o JOIN json_each(o.metrics, '$.n_calls') AS j
                WHERE o.snapshot_id = r.snapshot_id
                ORDER BY o.version DESC, o.outcome_id DESC LIMIT 1),
               (SELECT count(*) FROM entries AS e WHERE e.rollout_id = r.rollout_id)) AS calls,
           iif(r.state = 'retired', NULL,
               (SELECT coalesce(max(e.sequence_length - e.generation_length), 0) FROM entries AS e
                 WHERE e.rollout_id = r.rollout_id)) AS longest_prompt,
           iif(r.state = 'retired', NULL,
               (SELECT coalesce(max(e.sequence_length), 0) FROM entries AS e
                 WHERE e.rollout_id = r.rollout_id)) AS longest_sequence,
           iif(r.state = 'retired', (
               SELECT j.value FROM build_outcomes AS o JOIN json_each(o.metrics, '$.generated_tokens_captured') AS j
                WHERE o.snapshot_id = r.snapshot_id
                ORDER BY o.version DESC, o.outcome_id DESC LIMIT 1),
               (SELECT coalesce(sum(e.generation_length), 0) FROM entries AS e
                 WHERE e.rollout_id = r.rollout_id)) AS generated_tokens,
           EXISTS (SELECT 1 FROM incomplete_flags AS f WHERE f.rollout_id = r.rollout_id)
             OR EXISTS (SELECT 1 FROM call_intents AS i
                         WHERE i.rollout_id = r.rollout_id AND i.outcome IS NULL) AS incomplete,
           (SELECT count(*) FROM incomplete_flags AS f WHERE f.rollout_id = r.rollout_id) AS flags,
           (SELECT count(*) FROM call_intents AS i
             WHERE i.rollout_id = r.rollout_id AND i.outcome IS NULL) AS open_calls,
           iif(r.state = 'retired', NULL,
               (SELECT count(DISTINCT coalesce(e.agent, 'main')) FROM entries AS e
                 WHERE e.rollout_id = r.rollout_id)) AS agents,
           (
               SELECT o.outcome FROM build_outcomes AS o
                WHERE o.snapshot_id = r.snapshot_id
                ORDER BY o.version DESC, o.outcome_id DESC LIMIT 1) AS latest_outcome,
           (
               SELECT o.reason FROM build_outcomes AS o
                WHERE o.snapshot_id = r.snapshot_id
                ORDER BY o.version DESC, o.outcome_id DESC LIMIT 1) AS latest_reason,
           (SELECT group_concat(j.key || ' ' || j.value, ', ') FROM json_each((
               SELECT o.metrics FROM build_outcomes AS o
                WHERE o.snapshot_id = r.snapshot_id
                ORDER BY o.version DESC, o.outcome_id DESC LIMIT 1), '$.causes') AS j) AS latest_causes,
           datetime(CAST(round(r.opened_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(r.opened_at * 1000000) AS INTEGER) % 1000000) AS opened,
           CAST(strftime('%s', 'now') - r.opened_at AS INTEGER) AS age_seconds
    FROM rollouts AS r;
CREATE VIEW lost_calls AS
    SELECT i.rollout_id, i.model_call_id, i.agent, i.parent_agent, i.purpose, i.offers_tools, i.session_headers, r.state AS rollout_state,
           (SELECT group_concat(f.reason || iif(f.detail = '', '', ': ' || f.detail), '; ')
              FROM incomplete_flags AS f
             WHERE f.rollout_id = i.rollout_id AND f.model_call_id = i.model_call_id) AS flags,
           datetime(CAST(round(i.begun_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(i.begun_at * 1000000) AS INTEGER) % 1000000) AS begun,
           CAST(strftime('%s', 'now') - i.begun_at AS INTEGER) AS age_seconds,
           w.pid, w.host, w.writer_id, w.boot_id,
           datetime(CAST(round(w.started_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(w.started_at * 1000000) AS INTEGER) % 1000000) AS process_started,
           datetime(CAST(round(w.last_seen_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(w.last_seen_at * 1000000) AS INTEGER) % 1000000) AS process_last_seen
    FROM call_intents AS i
    LEFT JOIN rollouts AS r ON r.rollout_id = i.rollout_id
    LEFT JOIN writers AS w ON w.writer_id = i.writer_id
    WHERE i.outcome IS NULL;
CREATE VIEW call_chain AS
    SELECT e.rollout_id, e.model_call_id, e.prefix_call_id AS parent_call_id,
           (WITH RECURSIVE above(call_id) AS (
                SELECT e.prefix_call_id WHERE e.prefix_call_id IS NOT NULL
                UNION ALL
                SELECT p.prefix_call_id FROM above
                  JOIN entries AS p ON p.rollout_id = e.rollout_id AND p.model_call_id = above.call_id
                 WHERE p.prefix_call_id IS NOT NULL)
            SELECT count(*) + 1 FROM above) AS turn,
           e.prompt_length, e.prefix_length AS shared_tokens,
           round(1.0 * e.prefix_length / max(e.prompt_length, 1), 4) AS shared_fraction,
           e.prompt_length - e.prefix_length AS new_prompt_tokens,
           e.generation_length, e.model, e.finish_reason,
           e.agent, e.parent_agent, e.purpose, e.offers_tools, e.upstream,
           (SELECT j.value FROM json_each(e.extras, '$.continuity') AS j
             WHERE j.key IN ('reason', 'mode') AND j.value <> '' ORDER BY j.key DESC LIMIT 1) AS continuity,
           datetime(CAST(round(e.created_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(e.created_at * 1000000) AS INTEGER) % 1000000) AS created,
           datetime(CAST(round(e.stored_at * 1000000) AS INTEGER) / 1000000, 'unixepoch') || printf('.%06d', CAST(round(e.stored_at * 1000000) AS INTEGER) % 1000000) AS stored,
           e.rowid AS stored_order,
           (WITH RECURSIVE above(call_id, distance) AS (
                SELECT e.model_call_id, 0
                UNION ALL
                SELECT p.prefix_call_id, above.distance + 1 FROM above
                  JOIN entries AS p ON p.rollout_id = e.rollout_id AND p.model_call_id = above.call_id
                 WHERE p.prefix_call_id IS NOT NULL)
            SELECT call_id FROM above ORDER BY distance DESC LIMIT 1) AS root_call_id
    FROM entries AS e;
INSERT INTO numbers (n)
    WITH RECURSIVE counter(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM counter WHERE n < 1023) SELECT n FROM counter;
INSERT INTO capture_file (file_id, made_at)
    VALUES (lower(hex(randomblob(16))), (julianday('now') - 2440587.5) * 86400.0);
INSERT INTO alembic_version (version_num) VALUES ('0009');
