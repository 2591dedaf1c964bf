-- The whole schema in PostgreSQL, as of revision 0007. It is frozen: a later change is a later revision, for both
-- databases. The store runs it in one transaction, in the first schema of the search path.

CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO alembic_version (version_num) VALUES ('0007');

CREATE TABLE build_outcomes (
    rollout_id TEXT COLLATE "C" NOT NULL,
    outcome_id BIGINT GENERATED ALWAYS AS IDENTITY,
    snapshot_id TEXT COLLATE "C" NOT NULL,
    version INTEGER NOT NULL,
    outcome TEXT COLLATE "C" NOT NULL,
    reason TEXT COLLATE "C" NOT NULL,
    metrics TEXT COLLATE "C" NOT NULL,
    recorded_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (rollout_id, outcome_id),
    CHECK (outcome IN ('delivered', 'masked', 'failed', 'released'))
);

CREATE INDEX build_outcomes_by_id ON build_outcomes (outcome_id);
CREATE INDEX build_outcomes_by_rollout ON build_outcomes (rollout_id, version);
CREATE INDEX build_outcomes_by_snapshot ON build_outcomes (snapshot_id, version);
CREATE INDEX build_outcomes_masked ON build_outcomes (rollout_id, snapshot_id) WHERE outcome IN ('masked', 'failed');

CREATE TABLE capture_file (
    file_id TEXT COLLATE "C" NOT NULL,
    made_at DOUBLE PRECISION NOT NULL,
    copied_from TEXT COLLATE "C",
    PRIMARY KEY (file_id)
);

CREATE TABLE late_writes (
    rollout_id TEXT COLLATE "C" NOT NULL,
    model_call_id TEXT COLLATE "C" NOT NULL,
    state TEXT COLLATE "C" NOT NULL,
    payload_digest BYTEA NOT NULL,
    writer_id TEXT COLLATE "C" NOT NULL,
    attempted_at DOUBLE PRECISION NOT NULL,
    rowid BIGINT GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (rollout_id, model_call_id)
);

CREATE INDEX late_writes_in_order ON late_writes (rowid);

CREATE TABLE rollouts (
    rollout_id TEXT COLLATE "C" NOT NULL,
    incarnation TEXT COLLATE "C" NOT NULL,
    state TEXT COLLATE "C" NOT NULL,
    version INTEGER NOT NULL,
    snapshot_id TEXT COLLATE "C",
    opened_at DOUBLE PRECISION NOT NULL,
    frozen_at DOUBLE PRECISION,
    retired_at DOUBLE PRECISION,
    rowid BIGINT GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (rollout_id),
    CHECK (state IN ('open', 'frozen', 'retired'))
);

CREATE INDEX rollouts_in_order ON rollouts (rowid);
CREATE INDEX rollouts_by_retirement ON rollouts (retired_at) WHERE state = 'retired';
CREATE INDEX rollouts_by_state ON rollouts (state, rollout_id);

CREATE TABLE writers (
    writer_id TEXT COLLATE "C" NOT NULL,
    pid INTEGER NOT NULL,
    host TEXT COLLATE "C" NOT NULL,
    boot_id TEXT COLLATE "C" NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    last_seen_at DOUBLE PRECISION NOT NULL,
    committed BIGINT NOT NULL,
    PRIMARY KEY (writer_id)
);

CREATE TABLE call_histories (
    rollout_id TEXT COLLATE "C" NOT NULL,
    chain BYTEA NOT NULL,
    model_call_id TEXT COLLATE "C" NOT NULL,
    reasoning BYTEA NOT NULL,
    call_ids BYTEA NOT NULL,
    ended INTEGER NOT NULL,
    PRIMARY KEY (rollout_id, chain, model_call_id),
    CHECK (ended IN (0, 1)),
    FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id)
);

CREATE TABLE call_intents (
    rollout_id TEXT COLLATE "C" NOT NULL,
    model_call_id TEXT COLLATE "C" NOT NULL,
    writer_id TEXT COLLATE "C" NOT NULL,
    begun_at DOUBLE PRECISION NOT NULL,
    outcome TEXT COLLATE "C",
    detail TEXT COLLATE "C" NOT NULL,
    agent TEXT COLLATE "C",
    parent_agent TEXT COLLATE "C",
    purpose TEXT COLLATE "C",
    offers_tools INTEGER,
    session_headers TEXT COLLATE "C",
    rowid BIGINT GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (rollout_id, model_call_id),
    CHECK (offers_tools IN (0, 1)),
    CHECK (outcome IN ('refused')),
    CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')),
    FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id),
    FOREIGN KEY (writer_id) REFERENCES writers (writer_id)
);

CREATE INDEX call_intents_in_order ON call_intents (rowid);

CREATE TABLE entries (
    rollout_id TEXT COLLATE "C" NOT NULL,
    model_call_id TEXT COLLATE "C" NOT NULL,
    payload_digest BYTEA NOT NULL,
    sequence_digest BYTEA NOT NULL,
    prefix_call_id TEXT COLLATE "C",
    prefix_length INTEGER NOT NULL,
    prompt_length INTEGER NOT NULL,
    generation_length INTEGER NOT NULL,
    sequence_length INTEGER NOT NULL,
    schema_version INTEGER NOT NULL,
    model TEXT COLLATE "C" NOT NULL,
    finish_reason TEXT COLLATE "C",
    created_at DOUBLE PRECISION NOT NULL,
    stored_at DOUBLE PRECISION NOT NULL,
    writer_id TEXT COLLATE "C" NOT NULL,
    content TEXT COLLATE "C" NOT NULL,
    extras TEXT COLLATE "C" NOT NULL,
    prompt_suffix BYTEA NOT NULL,
    generation BYTEA NOT NULL,
    log_probs BYTEA NOT NULL,
    routed_experts BYTEA,
    agent TEXT COLLATE "C",
    parent_agent TEXT COLLATE "C",
    purpose TEXT COLLATE "C",
    offers_tools INTEGER,
    rowid BIGINT GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (rollout_id, model_call_id),
    CHECK ((prefix_call_id IS NULL) = (prefix_length = 0)),
    CHECK (length(generation) = 4 * generation_length),
    CHECK (length(log_probs) = 8 * generation_length),
    CHECK (length(prompt_suffix) = 4 * (prompt_length - prefix_length)),
    CHECK (offers_tools IN (0, 1)),
    CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')),
    CHECK (sequence_length = prompt_length + generation_length),
    FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id)
);

CREATE INDEX entries_by_length ON entries (rollout_id, sequence_length, generation_length, model, agent);
CREATE INDEX entries_in_order ON entries (rowid);
CREATE INDEX entries_of_rollout_in_order ON entries (rollout_id, rowid);

CREATE TABLE incomplete_flags (
    rollout_id TEXT COLLATE "C" NOT NULL,
    flag_id BIGINT GENERATED ALWAYS AS IDENTITY,
    model_call_id TEXT COLLATE "C" NOT NULL,
    reason TEXT COLLATE "C" NOT NULL,
    detail TEXT COLLATE "C" NOT NULL,
    flagged_at DOUBLE PRECISION NOT NULL,
    agent TEXT COLLATE "C",
    parent_agent TEXT COLLATE "C",
    purpose TEXT COLLATE "C",
    offers_tools INTEGER,
    session_headers TEXT COLLATE "C",
    PRIMARY KEY (rollout_id, flag_id),
    CHECK (offers_tools IN (0, 1)),
    CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')),
    FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id)
);

CREATE INDEX incomplete_flags_in_order ON incomplete_flags (flag_id);

CREATE TABLE snapshots (
    rollout_id TEXT COLLATE "C" NOT NULL,
    snapshot_id TEXT COLLATE "C" NOT NULL,
    version INTEGER NOT NULL,
    incomplete INTEGER NOT NULL,
    entry_count INTEGER NOT NULL,
    frozen_at DOUBLE PRECISION NOT NULL,
    rowid BIGINT GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (rollout_id, snapshot_id, version),
    CHECK (incomplete IN (0, 1)),
    FOREIGN KEY (rollout_id) REFERENCES rollouts (rollout_id)
);

CREATE INDEX snapshots_by_id ON snapshots (snapshot_id, version);
CREATE INDEX snapshots_in_order ON snapshots (rowid);

CREATE TABLE snapshot_entries (
    rollout_id TEXT COLLATE "C" NOT NULL,
    snapshot_id TEXT COLLATE "C" NOT NULL,
    version INTEGER NOT NULL,
    model_call_id TEXT COLLATE "C" NOT NULL,
    payload_digest BYTEA NOT NULL,
    sequence_digest BYTEA NOT NULL,
    prefix_call_id TEXT COLLATE "C",
    prefix_length INTEGER NOT NULL,
    prompt_length INTEGER NOT NULL,
    generation_length INTEGER NOT NULL,
    sequence_length INTEGER NOT NULL,
    schema_version INTEGER NOT NULL,
    model TEXT COLLATE "C" NOT NULL,
    finish_reason TEXT COLLATE "C",
    created_at DOUBLE PRECISION NOT NULL,
    stored_at DOUBLE PRECISION NOT NULL,
    writer_id TEXT COLLATE "C" NOT NULL,
    content TEXT COLLATE "C" NOT NULL,
    extras TEXT COLLATE "C" NOT NULL,
    prompt_suffix BYTEA NOT NULL,
    generation BYTEA NOT NULL,
    log_probs BYTEA NOT NULL,
    routed_experts BYTEA,
    agent TEXT COLLATE "C",
    parent_agent TEXT COLLATE "C",
    purpose TEXT COLLATE "C",
    offers_tools INTEGER,
    rowid BIGINT GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (rollout_id, snapshot_id, version, model_call_id),
    CHECK ((prefix_call_id IS NULL) = (prefix_length = 0)),
    CHECK (length(generation) = 4 * generation_length),
    CHECK (length(log_probs) = 8 * generation_length),
    CHECK (length(prompt_suffix) = 4 * (prompt_length - prefix_length)),
    CHECK (offers_tools IN (0, 1)),
    CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')),
    CHECK (sequence_length = prompt_length + generation_length),
    FOREIGN KEY (rollout_id, snapshot_id, version)
        REFERENCES snapshots (rollout_id, snapshot_id, version) DEFERRABLE INITIALLY DEFERRED
);

CREATE INDEX snapshot_entries_by_snapshot ON snapshot_entries (snapshot_id, version, rowid);

CREATE TABLE snapshot_flags (
    rollout_id TEXT COLLATE "C" NOT NULL,
    snapshot_id TEXT COLLATE "C" NOT NULL,
    version INTEGER NOT NULL,
    snapshot_flag_id BIGINT GENERATED ALWAYS AS IDENTITY,
    model_call_id TEXT COLLATE "C" NOT NULL,
    reason TEXT COLLATE "C" NOT NULL,
    detail TEXT COLLATE "C" NOT NULL,
    flagged_at DOUBLE PRECISION NOT NULL,
    agent TEXT COLLATE "C",
    parent_agent TEXT COLLATE "C",
    purpose TEXT COLLATE "C",
    offers_tools INTEGER,
    session_headers TEXT COLLATE "C",
    PRIMARY KEY (rollout_id, snapshot_id, version, snapshot_flag_id),
    CHECK (offers_tools IN (0, 1)),
    CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')),
    FOREIGN KEY (rollout_id, snapshot_id, version)
        REFERENCES snapshots (rollout_id, snapshot_id, version) DEFERRABLE INITIALLY DEFERRED
);

CREATE INDEX snapshot_flags_by_snapshot ON snapshot_flags (snapshot_id, version);

CREATE TABLE weight_version (
    only_row INTEGER NOT NULL,
    version TEXT COLLATE "C",
    PRIMARY KEY (only_row),
    CHECK (only_row = 1)
);

INSERT INTO capture_file (file_id, made_at)
VALUES (replace(gen_random_uuid()::text, '-', ''), extract(epoch FROM clock_timestamp()));

-- Ids and log probabilities hardly shrink, and are read whole: they are not compressed.
ALTER TABLE entries
    ALTER COLUMN prompt_suffix SET STORAGE EXTERNAL, ALTER COLUMN generation SET STORAGE EXTERNAL,
    ALTER COLUMN log_probs SET STORAGE EXTERNAL, ALTER COLUMN routed_experts SET STORAGE EXTERNAL;
ALTER TABLE snapshot_entries
    ALTER COLUMN prompt_suffix SET STORAGE EXTERNAL, ALTER COLUMN generation SET STORAGE EXTERNAL,
    ALTER COLUMN log_probs SET STORAGE EXTERNAL, ALTER COLUMN routed_experts SET STORAGE EXTERNAL;

-- Functions of SQLite's names, as far as the statements of this package use them. JSON may hold a NUL character,
-- which PostgreSQL has no text for.

CREATE FUNCTION readable_json(document text) RETURNS json
LANGUAGE sql IMMUTABLE STRICT AS $$ SELECT replace(document, '\u0000', '\ufffd')::json $$;

CREATE FUNCTION json_path(path text) RETURNS text[]
LANGUAGE sql IMMUTABLE STRICT AS $$ SELECT string_to_array(btrim(path, '$.[]'), '.') $$;

CREATE FUNCTION json_extract(document text, path text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT AS $$ SELECT readable_json(document) #>> json_path(path) $$;

CREATE FUNCTION instr(document text, part text) RETURNS integer
LANGUAGE sql IMMUTABLE STRICT AS $$ SELECT strpos(document, part) $$;

CREATE FUNCTION json_each(document text) RETURNS TABLE (value text)
LANGUAGE sql IMMUTABLE STRICT ROWS 20 AS $$ SELECT json_array_elements_text(document::json) $$;

CREATE FUNCTION json_each(document text, path text) RETURNS TABLE (key text, value text)
LANGUAGE plpgsql IMMUTABLE STRICT ROWS 5 AS $$
DECLARE
    found json := readable_json(document) #> json_path(path);
BEGIN
    CASE json_typeof(found)
        WHEN 'object' THEN RETURN QUERY SELECT e.key, e.value FROM json_each_text(found) AS e;
        WHEN 'array' THEN RETURN QUERY SELECT NULL, e FROM json_array_elements_text(found) AS e;
        ELSE RETURN;
    END CASE;
END
$$;

-- Packed columns for people: a token id is four bytes and a log probability eight, the least significant first.

CREATE FUNCTION unpacked_ids(packed bytea) RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    ids bigint[] := '{}';
BEGIN
    IF length(packed) % 4 <> 0 THEN
        RAISE EXCEPTION 'token ids are four bytes each, and these are % bytes', length(packed);
    END IF;
    FOR at IN 0 .. length(packed) / 4 - 1 LOOP
        ids[at + 1] := get_byte(packed, 4 * at) + (get_byte(packed, 4 * at + 1) << 8)
            + (get_byte(packed, 4 * at + 2) << 16) + (get_byte(packed, 4 * at + 3)::bigint << 24);
    END LOOP;
    RETURN ids;
END
$$;

CREATE FUNCTION token_ids(packed bytea) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $$ SELECT '[' || array_to_string(unpacked_ids(packed), ',') || ']' $$;

CREATE FUNCTION log_probs(packed bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    words bigint[] := unpacked_ids(packed);
    high bigint;
    exponent integer;
    fraction double precision;
    found text[] := '{}';
BEGIN
    IF length(packed) % 8 <> 0 THEN
        RAISE EXCEPTION 'log probabilities are eight bytes each, and these are % bytes', length(packed);
    END IF;
    FOR at IN 1 .. length(packed) / 8 LOOP
        high := words[2 * at];
        exponent := (high >> 20) & 2047;
        -- https://en.wikipedia.org/wiki/Double-precision_floating-point_format
        fraction := (((high & 1048575) << 32) + words[2 * at - 1])::double precision / 4503599627370496;
        found[at] := CASE WHEN high >= 2147483648 THEN '-' ELSE '' END
            || CASE WHEN exponent = 0 THEN fraction * 2::double precision ^ -1022
                    ELSE (1 + fraction) * 2::double precision ^ (exponent - 1023) END;
        IF found[at] !~ '[.e]' THEN
            found[at] := found[at] || '.0';
        END IF;
    END LOOP;
    RETURN '[' || array_to_string(found, ',') || ']';
END
$$;

CREATE FUNCTION utc(seconds double precision) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $$ SELECT to_char(to_timestamp(seconds) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') $$;

CREATE FUNCTION seconds_since(seconds double precision) RETURNS bigint
LANGUAGE sql VOLATILE STRICT PARALLEL SAFE
AS $$ SELECT trunc(extract(epoch FROM clock_timestamp()) - seconds)::bigint $$;

-- Snapshots are immutable, and the outcomes on them are an audit trail.

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a snapshot is immutable; freeze the rollout again for a new version';
END
$$;

CREATE FUNCTION refuse_late_copy() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM snapshots WHERE snapshot_id = NEW.snapshot_id AND version = NEW.version) THEN
        RAISE EXCEPTION 'a snapshot is immutable; freeze the rollout again for a new version';
    END IF;
    RETURN NEW;
END
$$;

CREATE FUNCTION keep_evidence() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT outcome FROM build_outcomes WHERE snapshot_id = OLD.snapshot_id
        ORDER BY version DESC, outcome_id DESC LIMIT 1) IN ('masked', 'failed') THEN
        RAISE EXCEPTION 'a masked or failed snapshot is evidence; record the outcome released to delete it';
    END IF;
    RETURN OLD;
END
$$;

CREATE FUNCTION refuse_truncate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'snapshots and their outcomes are evidence; retire or delete rollouts one by one';
END
$$;

CREATE FUNCTION refuse_new_words() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'outcomes are append-only; record a new one';
END
$$;

CREATE FUNCTION keep_outcomes() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM snapshots WHERE snapshot_id = OLD.snapshot_id) THEN
        RAISE EXCEPTION 'an outcome is kept for as long as its snapshot';
    END IF;
    RETURN OLD;
END
$$;

CREATE TRIGGER snapshots_immutable BEFORE UPDATE ON snapshots FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER snapshots_sealed BEFORE INSERT ON snapshots FOR EACH ROW EXECUTE FUNCTION refuse_late_copy();
CREATE TRIGGER snapshots_evidence BEFORE DELETE ON snapshots FOR EACH ROW EXECUTE FUNCTION keep_evidence();
CREATE TRIGGER snapshots_kept BEFORE TRUNCATE ON snapshots EXECUTE FUNCTION refuse_truncate();
CREATE TRIGGER snapshot_entries_immutable BEFORE UPDATE ON snapshot_entries
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER snapshot_entries_sealed BEFORE INSERT ON snapshot_entries
    FOR EACH ROW EXECUTE FUNCTION refuse_late_copy();
CREATE TRIGGER snapshot_entries_evidence BEFORE DELETE ON snapshot_entries
    FOR EACH ROW EXECUTE FUNCTION keep_evidence();
CREATE TRIGGER snapshot_entries_kept BEFORE TRUNCATE ON snapshot_entries EXECUTE FUNCTION refuse_truncate();
CREATE TRIGGER snapshot_flags_immutable BEFORE UPDATE ON snapshot_flags FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER snapshot_flags_sealed BEFORE INSERT ON snapshot_flags FOR EACH ROW EXECUTE FUNCTION refuse_late_copy();
CREATE TRIGGER snapshot_flags_evidence BEFORE DELETE ON snapshot_flags FOR EACH ROW EXECUTE FUNCTION keep_evidence();
CREATE TRIGGER snapshot_flags_kept BEFORE TRUNCATE ON snapshot_flags EXECUTE FUNCTION refuse_truncate();
CREATE TRIGGER build_outcomes_append_only BEFORE UPDATE ON build_outcomes
    FOR EACH ROW EXECUTE FUNCTION refuse_new_words();
CREATE TRIGGER build_outcomes_kept BEFORE DELETE ON build_outcomes FOR EACH ROW EXECUTE FUNCTION keep_outcomes();
CREATE TRIGGER build_outcomes_not_emptied BEFORE TRUNCATE ON build_outcomes EXECUTE FUNCTION refuse_truncate();

-- Views of the same names and columns as in SQLite; docs/views.md explains each column.

CREATE VIEW rollout_overview AS
SELECT r.rollout_id, r.state, r.version, r.snapshot_id,
       CASE WHEN r.state = 'retired' THEN json_extract(latest.metrics, '$.n_calls')::bigint
            ELSE (SELECT count(*) FROM entries AS e WHERE e.rollout_id = r.rollout_id) END AS calls,
       CASE WHEN r.state <> 'retired' THEN
           (SELECT coalesce(max(e.sequence_length - e.generation_length), 0) FROM entries AS e
             WHERE e.rollout_id = r.rollout_id) END AS longest_prompt,
       CASE WHEN r.state <> 'retired' THEN
           (SELECT coalesce(max(e.sequence_length), 0) FROM entries AS e
             WHERE e.rollout_id = r.rollout_id) END AS longest_sequence,
       CASE WHEN r.state = 'retired' THEN json_extract(latest.metrics, '$.generated_tokens_captured')::bigint
            ELSE (SELECT coalesce(sum(e.generation_length), 0) FROM entries AS e
                   WHERE e.rollout_id = r.rollout_id) END AS generated_tokens,
       (EXISTS (SELECT 1 FROM incomplete_flags AS f WHERE f.rollout_id = r.rollout_id)
         OR EXISTS (SELECT 1 FROM call_intents AS i
                     WHERE i.rollout_id = r.rollout_id AND i.outcome IS NULL))::integer AS incomplete,
       (SELECT count(*) FROM incomplete_flags AS f WHERE f.rollout_id = r.rollout_id) AS flags,
       (SELECT count(*) FROM call_intents AS i
         WHERE i.rollout_id = r.rollout_id AND i.outcome IS NULL) AS open_calls,
       CASE WHEN r.state <> 'retired' THEN
           (SELECT count(DISTINCT coalesce(e.agent, 'main')) FROM entries AS e
             WHERE e.rollout_id = r.rollout_id) END AS agents,
       latest.outcome AS latest_outcome,
       latest.reason AS latest_reason,
       (SELECT string_agg(j.key || ' ' || j.value, ', ') FROM json_each(latest.metrics, '$.causes') AS j)
         AS latest_causes,
       utc(r.opened_at) AS opened,
       seconds_since(r.opened_at) AS age_seconds
FROM rollouts AS r
LEFT JOIN LATERAL (
    SELECT o.outcome, o.reason, o.metrics FROM build_outcomes AS o
     WHERE o.snapshot_id = r.snapshot_id
     ORDER BY o.version DESC, o.outcome_id DESC LIMIT 1) AS latest ON true;

CREATE VIEW kept_evidence AS
SELECT s.rollout_id, s.snapshot_id, s.version, s.entry_count AS calls, s.incomplete,
       o.outcome, o.reason, o.version AS judged_version,
       (SELECT string_agg(j.value, '; ') FROM json_each(o.metrics, '$.reasons') AS j) AS all_reasons,
       (SELECT string_agg(
                   f.reason
                   || CASE WHEN f.model_call_id = '' THEN '' ELSE ' (call ' || f.model_call_id || ')' END
                   || CASE WHEN f.detail = '' THEN '' ELSE ': ' || f.detail END, '; ' ORDER BY f.snapshot_flag_id)
          FROM snapshot_flags AS f
         WHERE f.snapshot_id = s.snapshot_id AND f.version = s.version) AS flags,
       utc(s.frozen_at) AS frozen,
       utc(o.recorded_at) AS judged
FROM build_outcomes AS o
JOIN snapshots AS s ON s.snapshot_id = o.snapshot_id
WHERE o.outcome IN ('masked', 'failed')
  AND NOT EXISTS (SELECT 1 FROM build_outcomes AS later
                   WHERE later.snapshot_id = o.snapshot_id
                     AND (later.version, later.outcome_id) > (o.version, o.outcome_id));

CREATE VIEW lost_calls AS
SELECT i.rollout_id, i.model_call_id, i.agent, i.parent_agent, i.purpose, i.offers_tools, i.session_headers,
       r.state AS rollout_state,
       (SELECT string_agg(f.reason || CASE WHEN f.detail = '' THEN '' ELSE ': ' || f.detail END, '; ' ORDER BY f.flag_id)
          FROM incomplete_flags AS f
         WHERE f.rollout_id = i.rollout_id AND f.model_call_id = i.model_call_id) AS flags,
       utc(i.begun_at) AS begun,
       seconds_since(i.begun_at) AS age_seconds,
       w.pid, w.host, w.writer_id, w.boot_id,
       utc(w.started_at) AS process_started,
       utc(w.last_seen_at) AS process_last_seen
FROM call_intents AS i
LEFT JOIN rollouts AS r ON r.rollout_id = i.rollout_id
LEFT JOIN writers AS w ON w.writer_id = i.writer_id
WHERE i.outcome IS NULL;

CREATE VIEW late_calls AS
SELECT l.rollout_id, l.model_call_id, l.state AS refused_as, r.state AS rollout_state,
       utc(l.attempted_at) AS attempted,
       trunc(l.attempted_at - r.frozen_at)::bigint AS seconds_after_freeze,
       w.pid, w.host, w.writer_id, w.boot_id,
       utc(w.started_at) AS process_started,
       utc(w.last_seen_at) AS process_last_seen
FROM late_writes AS l
LEFT JOIN rollouts AS r ON r.rollout_id = l.rollout_id
LEFT JOIN writers AS w ON w.writer_id = l.writer_id;

CREATE VIEW call_chain AS
SELECT e.rollout_id, e.model_call_id, e.prefix_call_id AS parent_call_id,
       (WITH RECURSIVE above (call_id) AS (
            SELECT e.prefix_call_id WHERE e.prefix_call_id IS NOT NULL
            UNION ALL
            SELECT p.prefix_call_id FROM above
              JOIN entries AS p ON p.rollout_id = e.rollout_id AND p.model_call_id = above.call_id
             WHERE p.prefix_call_id IS NOT NULL)
        SELECT count(*) + 1 FROM above) AS turn,
       e.prompt_length, e.prefix_length AS shared_tokens,
       round(1.0 * e.prefix_length / greatest(e.prompt_length, 1), 4)::double precision AS shared_fraction,
       e.prompt_length - e.prefix_length AS new_prompt_tokens,
       e.generation_length, e.model, e.finish_reason,
       e.agent, e.parent_agent, e.purpose, e.offers_tools,
       (SELECT j.value FROM json_each(e.extras, '$.continuity') AS j
         WHERE j.key IN ('reason', 'mode') AND j.value <> '' ORDER BY j.key DESC LIMIT 1) AS continuity,
       utc(e.created_at) AS created,
       utc(e.stored_at) AS stored,
       e.rowid AS stored_order,
       (WITH RECURSIVE above (call_id, distance) AS (
            SELECT e.model_call_id, 0
            UNION ALL
            SELECT p.prefix_call_id, above.distance + 1 FROM above
              JOIN entries AS p ON p.rollout_id = e.rollout_id AND p.model_call_id = above.call_id
             WHERE p.prefix_call_id IS NOT NULL)
        SELECT call_id FROM above ORDER BY distance DESC LIMIT 1) AS root_call_id
FROM entries AS e;

CREATE VIEW call_tokens AS
SELECT e.rollout_id, e.model_call_id,
       CASE WHEN t.place <= e.prompt_length - e.prefix_length THEN 'prompt' ELSE 'generation' END AS part,
       e.prefix_length + t.place - 1 AS position,
       t.token_id
FROM entries AS e
CROSS JOIN LATERAL unnest(unpacked_ids(e.prompt_suffix || e.generation)) WITH ORDINALITY AS t (token_id, place);
